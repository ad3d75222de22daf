/* One page of keys against a block of queries: scores, online softmax, values. Everything is f32 in scratch memory,
 * rows padded to whole vectors with zeros. A query's bits do not depend on the queries beside it: each has its own
 * accumulators, in the same order. */
#ifndef GLM_CPU_ATTENTION_TILE_H
#define GLM_CPU_ATTENTION_TILE_H

#include <algorithm>
#include <limits>

#include "float_math.h"
#include "weight_loader.h"

GLM_CPU_BEGIN

inline constexpr int kPage = GLM_PAGE_SIZE;
/* 3 queries x 4 keys (or 4 vectors of values) of accumulators fit the 16 registers of AVX2 beside their operands. */
inline constexpr int kQueryBlock = 3;
inline constexpr int kKeyBlock = 4;
inline constexpr int kValueBlock = 4;

/* Running softmax of one query: `values` are weighted by exp(score - max), `total` is the sum of those weights. */
struct SoftmaxState {
  float max;
  float total;
};

/* Where a tile finds a page's keys or values: in scratch memory, */
struct ScratchPage {
  const float* data;
  F32 at(int64_t i) const { return load(data + i); }
  ScratchPage from(int64_t column) const { return {data + column}; }
  void fetch_ahead(int64_t) const {}
};

/* or, for one block of queries, which would not pay for a conversion, as they are stored. Pages are scattered, so the
 * hardware does not foresee `next`: it is fetched meanwhile, kKeyBlock (kValueBlock) vectors for as many read. */
struct StoredPage {
  const uint16_t* data; /* bf16 */
  const std::byte* next;
  F32 at(int64_t i) const { return Bf16Loader::fetch(data + i); }
  StoredPage from(int64_t column) const { return {data + column, next + column * kPage * 2}; }
  void fetch_ahead(int64_t block) const {
    constexpr int kBytes = kKeyBlock * kLanes * 2, kLine = 64;
    for (int line = 0; line < kBytes; line += kLine) __builtin_prefetch(next + block * kBytes + line);
  }
};

/* scores[q][key] = queries[q] . keys[key] for kQueries queries and the whole page. */
template <int kQueries, typename Page>
inline void page_scores(const float* queries, const Page& keys, int pitch, float* scores) {
  for (int key = 0; key < kPage; key += kKeyBlock) {
    F32 sums[kQueries][kKeyBlock];
    unrolled<kQueries * kKeyBlock>([&](auto i) GLM_INLINE { sums[i / kKeyBlock][i % kKeyBlock] = F32{}; });
#pragma GCC unroll 1
    for (int i = 0; i < pitch; i += kLanes) {
      keys.fetch_ahead((key / kKeyBlock * pitch + i) / kLanes);
      F32 x[kQueries];
      unrolled<kQueries>([&](auto q) GLM_INLINE {
        x[q] = load(queries + q * pitch + i);
        if (kQueries > 1) hold(x[q]);
      });
      unrolled<kKeyBlock>([&](auto j) GLM_INLINE {
        const F32 k = keys.at((key + j) * pitch + i);
        unrolled<kQueries>([&](auto q) GLM_INLINE { sums[q][j] = multiply_add(x[q], k, sums[q][j]); });
      });
    }
    unrolled<kQueries>([&](auto q) GLM_INLINE {
      const F32x4 totals = sum_four(sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
      std::memcpy(scores + q * kPage + key, &totals, sizeof totals);
    });
  }
}

/* scores become weights relative to the new maximum; the return value scales what was summed before. Keys from `count`
 * on are masked. */
inline float page_softmax(float* scores, int count, SoftmaxState* state) {
  if (count < kPage) std::fill(scores + count, scores + kPage, -std::numeric_limits<float>::infinity());
  F32 best = load(scores);
  for (int key = kLanes; key < kPage; key += kLanes) {
    const F32 v = load(scores + key);
    best = v > best ? v : best;
  }
  float max = state->max;
  for (int lane = 0; lane < kLanes; ++lane) max = best[lane] > max ? best[lane] : max;
  for (int key = 0; key < kPage; ++key) scores[key] = exp_f32(scores[key] - max);
  F32 weights = load(scores);
  for (int key = kLanes; key < kPage; key += kLanes) weights += load(scores + key);
  const float scale = exp_f32(state->max - max);
  *state = {max, state->total * scale + sum(weights)};
  return scale;
}

/* values[q] = values[q] * scales[q] + sum over the first `count` keys of weights[q][key] * page[key], for kVectors
 * vectors. */
template <int kQueries, int kVectors, typename Page>
inline void value_columns(const float* weights, const float* scales, const Page& page, int count, int pitch,
                          float* values) {
  F32 sums[kQueries][kVectors];
  const auto each = [](auto f) GLM_INLINE {
    unrolled<kQueries>([&](auto q) GLM_INLINE { unrolled<kVectors>([&](auto j) GLM_INLINE { f(q, j); }); });
  };
  each([&](auto q, auto j) GLM_INLINE { sums[q][j] = load(values + q * pitch + j * kLanes) * broadcast(scales[q]); });
#pragma GCC unroll 1
  for (int key = 0; key < count; ++key) {
    if constexpr (kVectors == kValueBlock) page.fetch_ahead(key);
    F32 weight[kQueries];
    unrolled<kQueries>([&](auto q) GLM_INLINE {
      weight[q] = broadcast(weights[q * kPage + key]);
      if (kQueries > 1) hold(weight[q]);
    });
    unrolled<kVectors>([&](auto j) GLM_INLINE {
      const F32 v = page.at(key * pitch + j * kLanes);
      unrolled<kQueries>([&](auto q) GLM_INLINE { sums[q][j] = multiply_add(weight[q], v, sums[q][j]); });
    });
  }
  each([&](auto q, auto j) GLM_INLINE { store(values + q * pitch + j * kLanes, sums[q][j]); });
}

template <int kQueries, typename Page>
inline void page_values(const float* weights, const float* scales, const Page& page, int count, int pitch,
                        float* values) {
  int i = 0;
  for (; i + kValueBlock * kLanes <= pitch; i += kValueBlock * kLanes) {
    value_columns<kQueries, kValueBlock>(weights, scales, page.from(i), count, pitch, values + i);
  }
  for (; i < pitch; i += kLanes) value_columns<kQueries, 1>(weights, scales, page.from(i), count, pitch, values + i);
}

/* All of a page for kQueries queries that see its first `count` keys. */
template <int kQueries, typename Page>
inline void attend_page(const float* queries, const Page& keys, const Page& page, int count, int pitch,
                        SoftmaxState* states, float* values) {
  alignas(64) float scores[kQueries * kPage];
  float scales[kQueries];
  page_scores<kQueries>(queries, keys, pitch, scores);
  for (int q = 0; q < kQueries; ++q) scales[q] = page_softmax(scores + q * kPage, count, states + q);
  page_values<kQueries>(scores, scales, page, count, pitch, values);
}

/* Adds what later keys gave (`part`, weighted from its own maximum) to what earlier keys gave. */
inline void merge_softmax(const SoftmaxState& part, const float* part_values, int pitch, SoftmaxState* state,
                          float* values) {
  const float max = part.max > state->max ? part.max : state->max;
  const float keep = exp_f32(state->max - max);
  const float add = exp_f32(part.max - max);
  *state = {max, state->total * keep + part.total * add};
  for (int i = 0; i < pitch; i += kLanes) {
    store(values + i, multiply_add(load(part_values + i), broadcast(add), load(values + i) * broadcast(keep)));
  }
}

GLM_CPU_END

#endif
