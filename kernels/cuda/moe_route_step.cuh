/* A step of the router: weights and tokens as tensor cores take them, at f32's precision: a weight is the exact sum of three bf16 numbers, and
 * activations are bf16. */
#ifndef GLM_CUDA_MOE_ROUTE_STEP_CUH
#define GLM_CUDA_MOE_ROUTE_STEP_CUH

#include <type_traits>

#include "kernel.cuh"
#include "mma.cuh"

namespace glm::cuda {

constexpr int kRouteExperts = 16; /* of a block */
constexpr int kRouteWarps = 8;
constexpr int kRouteSplit = 8;                                       /* blocks of a cluster, which share K */
constexpr int kRouteStep = 16;                                       /* elements of K that a warp multiplies at once */
constexpr int kRouteStride = kRouteSplit * kRouteWarps * kRouteStep; /* from a step of a warp to its next */
constexpr int kRouteAhead = 5; /* steps whose weights decode reads before the predecessor ends: all of 5120 columns */
/* Up to so many times eight tokens come straight to registers, and blocks send each other their sums: of 64 tokens that is slower. */
constexpr int kFewTiles = 2;

/* Elements of K, from `k` on, in the order that a lane multiplies them; zeros past the end. */
template <typename W>
__device__ __forceinline__ float4 load_route_weights(const W* row, int k, int n) {
  float values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = k + i < n ? to_float(row[k + i]) : 0.0f;
  return make_float4(values[0], values[1], values[2], values[3]);
}
template <>
__device__ __forceinline__ float4 load_route_weights<float>(const float* row, int k, int n) {
  if (k + 4 <= n && reinterpret_cast<uintptr_t>(row) % 16 == 0) return *reinterpret_cast<const float4*>(row + k);
  float values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = k + i < n ? row[k + i] : 0.0f;
  return make_float4(values[0], values[1], values[2], values[3]);
}

__device__ __forceinline__ uint2 load_route_tokens(const bf16* row, int k, int n) {
  if (row == nullptr) return make_uint2(0, 0);
  if (k + 4 <= n && reinterpret_cast<uintptr_t>(row) % 8 == 0) return __ldcg(reinterpret_cast<const uint2*>(row + k));
  uint16_t values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = k + i < n ? __bfloat16_as_ushort(__ldcg(row + k + i)) : 0;
  return make_uint2(values[0] | static_cast<uint32_t>(values[1]) << 16, values[2] | static_cast<uint32_t>(values[3])
                                                                                        << 16);
}

/* Takes the leading bf16 of two numbers off them. */
__device__ __forceinline__ uint32_t take_bf16(float& x, float& y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  x -= __low2float(pair);
  y -= __high2float(pair);
  return reinterpret_cast<const uint32_t&>(pair);
}

/* Weights of a step: of rows group and group + 8. */
struct RouteWeights {
  float4 low;
  float4 high;
};

template <typename W>
constexpr int kRoutePieces = std::is_same_v<W, bf16> ? 1 : 3;

/* Weights of a step as operands of the multiplies, one a piece. */
template <typename W>
struct RoutePieces {
  uint32_t a[kRoutePieces<W>][4];
};

template <typename W>
__device__ __forceinline__ RoutePieces<W> split_weights(RouteWeights w) {
  RoutePieces<W> pieces;
#pragma unroll
  for (auto& a : pieces.a) {
    a[0] = take_bf16(w.low.x, w.low.y);
    a[1] = take_bf16(w.high.x, w.high.y);
    a[2] = take_bf16(w.low.z, w.low.w);
    a[3] = take_bf16(w.high.z, w.high.w);
  }
  return pieces;
}

/* Adds a step to the warp's sums, kTiles times eight tokens. A token's sum is made in the same order
 * for every kTiles. */
template <typename W, int kTiles>
__device__ __forceinline__ void multiply_route_step(const RoutePieces<W>& pieces, const uint2 b[kTiles],
                                                    float sums[kTiles][4]) {
#pragma unroll
  for (const auto& a : pieces.a) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) mma_16x8x16<bf16>(sums[tile], a, b[tile].x, b[tile].y);
  }
}

}  // namespace glm::cuda

#endif
