/* Dot products in f32 by one warp: the path for dtypes that tensor cores cannot multiply at f32's precision. */
#ifndef GLM_CUDA_DOT_CUH
#define GLM_CUDA_DOT_CUH

#include "kernel.cuh"
#include "numeric.cuh"

namespace glm::cuda {

constexpr int kDotTokens = 4;
constexpr int kDotWarps = 4;

/* sums[i] = w . x[i], the same in every lane; absent tokens are nullptr and give 0. */
template <typename X, typename W>
__device__ __forceinline__ void warp_dots(const W* w, const X* const x[kDotTokens], int32_t n, float sums[kDotTokens]) {
#pragma unroll
  for (int i = 0; i < kDotTokens; ++i) sums[i] = 0.0f;
  for (int32_t k = static_cast<int32_t>(threadIdx.x) % kWarp; k < n; k += kWarp) {
    const float weight = to_float(w[k]);
#pragma unroll
    for (int i = 0; i < kDotTokens; ++i) {
      if (x[i] != nullptr) sums[i] = fmaf(weight, to_float(x[i][k]), sums[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kDotTokens; ++i) sums[i] = warp_sum(sums[i]);
}

}  // namespace glm::cuda

#endif
