/* The inner kernel of every matrix product: R weight rows times T rows of x.
 *
 * The order of one output's sum is the same wherever it is computed: each lane adds its columns, ascending by step and
 * in the loader's order within one, in one accumulator; lanes are added last, in a fixed tree. Parallelism comes from
 * several outputs, never from splitting K. With block scales each 128 columns are summed so from zero and then scaled
 * into the accumulator. */
#ifndef GLM_CPU_DOT_TILE_H
#define GLM_CPU_DOT_TILE_H

#include "weight_loader.h"

GLM_CPU_BEGIN

/* kKeep: the expanded weights are written to `kept`, as KeptTile reads them. */
template <typename Loader, int R, int T, bool kKeep = false>
struct DotTile {
  using Element = typename Loader::Element;
  using Sums = F32[R][T];
  static constexpr int kStep = Loader::kVectors * kLanes;

  const Element* w[R];    /* at column 0 */
  const float* x[T];      /* likewise; zeros follow the last column up to kPadCols */
  const std::byte* ahead; /* as many bytes as the tile's weights have are fetched from here into the cache */
  float* kept;            /* [columns / kLanes][R][kLanes] */

  /* sums[r][t] += w[r] . x[t] over columns [begin, end). */
  [[gnu::always_inline]] void accumulate(int32_t begin, int32_t end, Sums& sums) const {
    constexpr int kLine = 64;
    constexpr int kStepBytes = R * kStep * static_cast<int>(sizeof(Element));
    int32_t k = begin;
    /* One step a turn: the compiler would overlap the loads of several, and spill sums for them. */
#pragma GCC unroll 1
    for (; k + kStep <= end; k += kStep) {
      const std::byte* lines = ahead + static_cast<int64_t>(k / kStep) * kStepBytes;
      unrolled<(kStepBytes + kLine - 1) / kLine>([&](auto line)
                                                     GLM_INLINE { __builtin_prefetch(lines + line * kLine); });
      step(w, k, k, sums);
    }
    if (k < end) last_step(k, end - k, sums);
  }

 private:
  using Raw = typename Loader::Raw;
  /* Rows that share a load of x in a narrow tile, whose registers hold R * T sums, these rows' elements and one
   * expanded vector of each. */
  static constexpr int kGroup = Loader::kVectors > 1 ? 1 : R == 4 ? 2 : R;

  /* The columns that do not fill a step: zeros for the rest. */
  [[gnu::always_inline]] void last_step(int32_t k, int32_t cols, Sums& sums) const {
    Element padded[R][kStep] = {};
    const Element* rows[R];
    for (int r = 0; r < R; ++r) {
      std::memcpy(padded[r], w[r] + k, static_cast<size_t>(cols) * sizeof(Element));
      rows[r] = padded[r];
    }
    step(rows, 0, k, sums);
  }

  [[gnu::always_inline]] void step(const Element* const (&rows)[R], int32_t w_col, int32_t x_col, Sums& sums) const {
    if constexpr (T <= 2 && Loader::kVectors > 1) {
      step_by_halves(rows, w_col, x_col, sums);
    } else if constexpr (T > 4) {
      step_wide(rows, w_col, x_col, sums);
    } else {
      step_narrow(rows, w_col, x_col, sums);
    }
  }

  /* With one or two rows of x the limit is the expanding and then the latency of sums: all weight rows add two vectors
   * before any adds the other two. */
  [[gnu::always_inline]] void step_by_halves(const Element* const (&rows)[R], int32_t w_col, int32_t x_col,
                                             Sums& sums) const {
    unrolled<2>([&](auto half) GLM_INLINE {
      F32 columns[T][2];
      unrolled<T * 2>([&](auto i) GLM_INLINE {
        columns[i / 2][i % 2] = load(x[i / 2] + x_col + (2 * half + i % 2) * kLanes);
        hold(columns[i / 2][i % 2]);
      });
      unrolled<R>([&](auto r) GLM_INLINE {
        const Raw raw = Loader::template fetch_half<half>(rows[r] + w_col);
        unrolled<2>([&](auto v) GLM_INLINE {
          const F32 weights = Loader::template expand_half<v>(raw);
          unrolled<T>([&](auto t) GLM_INLINE { sums[r][t] = multiply_add(weights, columns[t][v], sums[r][t]); });
        });
      });
    });
  }

  [[gnu::always_inline]] void step_narrow(const Element* const (&rows)[R], int32_t w_col, int32_t x_col,
                                          Sums& sums) const {
    unrolled<R / kGroup>([&](auto group) GLM_INLINE {
      constexpr int kFirst = group * kGroup;
      Raw raw[kGroup];
      unrolled<kGroup>([&](auto r) GLM_INLINE { raw[r] = Loader::fetch(rows[kFirst + r] + w_col); });
      unrolled<Loader::kVectors>([&](auto v) GLM_INLINE {
        F32 weights[kGroup];
        unrolled<kGroup>([&](auto r) GLM_INLINE {
          weights[r] = Loader::template expand<v>(raw[r]);
          hold(weights[r]);
          if constexpr (kKeep) store(kept + (x_col / kLanes + v) * (R * kLanes) + (kFirst + r) * kLanes, weights[r]);
        });
        unrolled<T>([&](auto t) GLM_INLINE {
          const F32 column = load(x[t] + x_col + v * kLanes);
          unrolled<kGroup>(
              [&](auto r) GLM_INLINE { sums[kFirst + r][t] = multiply_add(weights[r], column, sums[kFirst + r][t]); });
        });
      });
    });
  }

  /* Loads would limit it if each row loaded x: all rows share one, and codes are read again for each of their vectors,
   * because no register is left to hold them. */
  [[gnu::always_inline]] void step_wide(const Element* const (&rows)[R], int32_t w_col, int32_t x_col,
                                        Sums& sums) const {
    unrolled<Loader::kVectors>([&](auto v) GLM_INLINE {
      F32 weights[R];
      unrolled<R>([&](auto r) GLM_INLINE {
        weights[r] = Loader::template expand_at<v>(rows[r] + w_col);
        hold(weights[r]);
      });
      unrolled<T>([&](auto t) GLM_INLINE {
        F32 column = load(x[t] + x_col + v * kLanes);
        hold(column);
        unrolled<R>([&](auto r) GLM_INLINE { sums[r][t] = multiply_add(weights[r], column, sums[r][t]); });
      });
    });
  }
};

GLM_CPU_END

#endif
