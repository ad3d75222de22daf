/* Weights that stay expanded while many rows of x pass: their first tile writes them down, the others read floats. */
#ifndef GLM_CPU_KEPT_TILE_H
#define GLM_CPU_KEPT_TILE_H

#include <algorithm>

#include "activations.h"
#include "workspace.h"

GLM_CPU_BEGIN

inline constexpr int32_t kKeptTileRows = 3;
inline constexpr int32_t kMostKeptRows = 24;
/* With more, the rows of x and of weights of one tile together overflow the first-level cache. */
inline constexpr int32_t kMostKeptCols = 1280;

/* Each thread's room for expanded weights. */
class KeptWeights {
 public:
  KeptWeights(WorkspaceLayout& layout, int num_threads, int32_t cols)
      : pitch_(cols > kMostKeptCols ? 0 : static_cast<size_t>(rows(cols) * padded(cols))),
        floats_(layout.take<float>(static_cast<size_t>(num_threads) * pitch_)) {}

  float* of(int thread) const { return floats_ + static_cast<size_t>(thread) * pitch_; }

  /* How many weight rows are kept at a time: with some rows of x, they stay in the second-level cache. */
  static int32_t rows(int32_t cols) {
    constexpr int64_t kFloats = 16384;
    const auto most = static_cast<int32_t>(kFloats / padded(cols));
    return std::min(kMostKeptRows, most / kKeptTileRows * kKeptTileRows);
  }

 private:
  size_t pitch_;
  float* floats_;
};

/* R kept rows times T rows of x, in DotTile's order of sums. */
template <int R, int T>
struct KeptTile {
  using Sums = F32[R][T];
  const float* kept; /* [columns / kLanes][R][kLanes] */
  const float* x[T];

  [[gnu::always_inline]] void accumulate(int32_t begin, int32_t end, Sums& sums) const {
#pragma GCC unroll 1
    for (int32_t k = begin; k < end; k += kLanes) {
      F32 weights[R];
      unrolled<R>([&](auto r) GLM_INLINE {
        weights[r] = load(kept + k * R + r * kLanes);
        hold(weights[r]);
      });
      unrolled<T>([&](auto t) GLM_INLINE {
        const F32 column = load(x[t] + k);
        unrolled<R>([&](auto r) GLM_INLINE { sums[r][t] = multiply_add(weights[r], column, sums[r][t]); });
      });
    }
  }
};

GLM_CPU_END

#endif
