/* Online softmax over a tile of 64 keys, in the registers of a warp that holds the scores of 16 query rows as mma (and wgmma) leave them:
 * lane = 4 * group + member has rows group and group + 8; element 4 * i + j is row group + j / 2 * 8, key 8 * i + 2 * member + j % 2. */
#ifndef GLM_CUDA_ATTENTION_SOFTMAX_CUH
#define GLM_CUDA_ATTENTION_SOFTMAX_CUH

#include "attention.cuh"

namespace glm::cuda {

constexpr int kTileScores = 16 * kTileKeys / kWarp; /* of a lane */

__device__ __forceinline__ int lane_index() {
  return static_cast<int>(threadIdx.x) % kWarp;
}
__device__ __forceinline__ int lane_group() {
  return lane_index() / 4;
}
__device__ __forceinline__ int lane_member() {
  return lane_index() % 4;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Of a lane's two rows: the largest score so far, unscaled; this lane's part of the sum of exponentials. */
struct TileRows {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};
};

/* Scores of keys after a row's position become -inf. */
__device__ __forceinline__ void mask_scores(float (&scores)[kTileScores], int first_key, const int (&positions)[2]) {
#pragma unroll
  for (int i = 0; i < kTileScores; ++i) {
    const int key = first_key + i / 4 * 8 + lane_member() * 2 + i % 2;
    if (key > positions[i % 4 / 2]) scores[i] = -INFINITY;
  }
}

/* Turns scores into weights 2^(scale * (score - max)); `factors`: of what was summed before. */
__device__ __forceinline__ void softmax_tile(float (&scores)[kTileScores], float scale, TileRows& rows,
                                             float (&factors)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
    for (int i = 4; i < kTileScores; i += 4) {
      largest = fmaxf(largest, fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]));
    }
    largest = fmaxf(rows.max[half], quad_max(largest));
    const float offset = largest * scale;
    factors[half] = exp2_approx(rows.max[half] * scale - offset);
    rows.max[half] = largest;
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kTileScores; i += 4) {
      float& x = scores[i + 2 * half];
      float& y = scores[i + 2 * half + 1];
      x = exp2_approx(fmaf(x, scale, -offset));
      y = exp2_approx(fmaf(y, scale, -offset));
      sums[i / 8] += x + y; /* of 16 keys, decode's share of a warp */
    }
    rows.sum[half] = fmaf(rows.sum[half], factors[half], (sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

/* Whether a row's largest score has grown, and with it what was summed before must shrink. Warps agree. */
__device__ __forceinline__ bool has_grown(const float (&factors)[2]) {
  return __any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f) != 0;
}

template <int N>
__device__ __forceinline__ void rescale(float (&sums)[N], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] *= factors[i % 4 / 2];
}

/* What `merge` takes of row `half`. All lanes of the warp call it. */
__device__ __forceinline__ SoftmaxState split_state(const TileRows& rows, int half, float scale) {
  return {rows.max[half] * scale, quad_sum(rows.sum[half])};
}

/* The result of a row. Adding 0 makes -0 one with 0: weights of 0 may have met it in a wider tile. */
__device__ __forceinline__ float normalized(float sum, float weight) {
  return sum / weight + 0.0f;
}

}  // namespace glm::cuda

#endif
