/* The inner kernel of every matrix product: R weight rows times T rows of x.
 *
 * The order of one output's sum is the same wherever it is computed: lane l adds the columns k = l modulo kLanes,
 * ascending, in one accumulator; lanes are added last, in a fixed tree. Parallelism comes from several outputs, never
 * from splitting K. With block scales each 128 columns are summed so from zero and then scaled into the accumulator. */
#ifndef GLM_CPU_DOT_TILE_H
#define GLM_CPU_DOT_TILE_H

#include <algorithm>

#include "weight_loader.h"

GLM_CPU_BEGIN

/* Stream: the weights come from memory once, so the rows `ahead` elements further on are fetched into the second-level cache. */
template <typename Loader, int R, int T, bool Stream>
struct DotTile {
  using Element = typename Loader::Element;
  static constexpr int kStep = Loader::kVectors * kLanes;

  const Element* w[R];      /* at column 0 of the tile */
  const float* x[T];        /* likewise; zeros follow the last column up to kPadCols */
  const float* w_scales[R]; /* block format: of the tile's first 128 columns and on */
  const float* x_scales[T];
  int64_t ahead; /* with Stream */

  /* sums[r * T + t] += w[r] . x[t] over `cols` columns. */
  void accumulate(int32_t cols, F32* sums) const {
    F32 part[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) part[r][t] = sums[r * T + t];
    }
    dot(0, cols, part);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sums[r * T + t] = part[r][t];
    }
  }

  void accumulate_blocks(int32_t cols, F32* sums) const {
    for (int32_t k = 0, b = 0; k < cols; k += GLM_FP8_BLOCK, ++b) {
      F32 part[R][T] = {};
      dot(k, std::min<int32_t>(cols, k + GLM_FP8_BLOCK), part);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const F32 scale = broadcast(x_scales[t][b] * w_scales[r][b]);
          sums[r * T + t] = multiply_add(part[r][t], scale, sums[r * T + t]);
        }
      }
    }
  }

 private:
  [[gnu::always_inline]] void dot(int32_t begin, int32_t end, F32 (&part)[R][T]) const {
    /* A cache line of streamed weights a turn, two of an expanded panel. */
    constexpr int kStepsPerTurn = std::max<int>(1, (Stream ? 64 : 128) / (kStep * static_cast<int>(sizeof(Element))));
    const auto load_all = [](const Element* p, F32(&v)[Loader::kVectors]) { Loader::load(p, v); };
    int32_t k = begin;
    for (; k + kStepsPerTurn * kStep <= end; k += kStepsPerTurn * kStep) {
      if constexpr (Stream) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) __builtin_prefetch(w[r] + ahead + k, 0, 2);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kStepsPerTurn; ++i) step(k + i * kStep, part, load_all);
    }
    for (; k + kStep <= end; k += kStep) step(k, part, load_all);
    if (k < end) {
      const int left = end - k;
      step(k, part, [left](const Element* p, F32(&v)[Loader::kVectors]) { load_first_elements<Loader>(p, left, v); });
    }
  }

  template <typename Load>
  [[gnu::always_inline]] void step(int32_t k, F32 (&part)[R][T], Load load_weights) const {
    constexpr int kVectors = Loader::kVectors;
    if constexpr (kVectors == 1 && R <= T) { /* hold the weights in registers, pass over x */
      F32 weights[R][1];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        load_weights(w[r] + k, weights[r]);
        hold(weights[r][0]);
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const F32 column = load(x[t] + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) part[r][t] = multiply_add(weights[r][0], column, part[r][t]);
      }
    } else { /* pass over the weights, x from the first-level cache */
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        F32 weights[kVectors];
        load_weights(w[r] + k, weights);
#pragma GCC unroll 16
        for (int i = 0; i < kVectors * T; ++i) {
          const int v = i / T, t = i % T;
          part[r][t] = multiply_add(weights[v], load(x[t] + k + v * kLanes), part[r][t]);
        }
        asm("" : : : "memory"); /* holding x for the next row would spill sums */
      }
    }
  }
};

GLM_CPU_END

#endif
