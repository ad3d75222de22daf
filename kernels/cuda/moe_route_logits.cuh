/* Router scores on tensor cores at f32's precision: a weight is the exact sum of three bf16 numbers, and activations are bf16. */
#ifndef GLM_CUDA_MOE_ROUTE_LOGITS_CUH
#define GLM_CUDA_MOE_ROUTE_LOGITS_CUH

#include <cooperative_groups.h>

#include "kernel.cuh"
#include "mma.cuh"

namespace glm::cuda {

constexpr int kRouteExperts = 16; /* of a block */
constexpr int kRouteTokens = 64;
constexpr int kRouteWarps = 8;
constexpr int kRouteSplit = 8; /* blocks of a cluster, which share K */
constexpr int kRouteTiles = kRouteTokens / 8;

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
  if (k + 4 <= n && reinterpret_cast<uintptr_t>(row) % 8 == 0) return *reinterpret_cast<const uint2*>(row + k);
  uint16_t values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = k + i < n ? __bfloat16_as_ushort(row[k + i]) : 0;
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

/* Adds 16 elements of K to the warp's sums. */
template <typename W>
__device__ __forceinline__ void route_step(const W* const weights[2], const bf16* const tokens[kRouteTiles], int k,
                                           int n, float sums[kRouteTiles][4]) {
  constexpr int kPieces = std::is_same_v<W, bf16> ? 1 : 3;
  float4 low = load_route_weights(weights[0], k, n);
  float4 high = load_route_weights(weights[1], k, n);
  uint2 b[kRouteTiles];
#pragma unroll
  for (int tile = 0; tile < kRouteTiles; ++tile) b[tile] = load_route_tokens(tokens[tile], k, n);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    uint32_t a[4];
    a[0] = take_bf16(low.x, low.y);
    a[1] = take_bf16(high.x, high.y);
    a[2] = take_bf16(low.z, low.w);
    a[3] = take_bf16(high.z, high.w);
#pragma unroll
    for (int tile = 0; tile < kRouteTiles; ++tile) mma_16x8x16<bf16>(sums[tile], a, b[tile].x, b[tile].y);
  }
}

/* Block (x, y): 16 experts times the cluster's split of K, 64 tokens. */
template <typename W>
__global__ void __launch_bounds__(kRouteWarps* kWarp)
    route_logits_mma_kernel(glm_tensor x, glm_weight weight, int32_t rows, float* logits) {
  namespace cg = cooperative_groups;
  __shared__ float partials[kRouteWarps][kRouteTokens][kRouteExperts + 1];
  __shared__ float totals[kRouteTokens][kRouteExperts];
  begin_kernel();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
  const int rank = static_cast<int>(blockIdx.x) % kRouteSplit;
  const int first_expert = static_cast<int>(blockIdx.x) / kRouteSplit * kRouteExperts;
  const int first_token = static_cast<int>(blockIdx.y) * kRouteTokens;
  const W* weights[2];
  for (int i = 0; i < 2; ++i) {
    weights[i] =
        static_cast<const W*>(weight.data) + min(first_expert + group + i * 8, weight.rows - 1) * weight.stride;
  }
  const bf16* tokens[kRouteTiles];
#pragma unroll
  for (int i = 0; i < kRouteTiles; ++i) {
    const int token = first_token + i * 8 + group;
    tokens[i] = token < rows ? row_of<bf16>(x, token) : nullptr;
  }
  float sums[kRouteTiles][4] = {};
#pragma unroll 3
  for (int step = rank * kRouteWarps + warp; step * 16 < x.cols; step += kRouteSplit * kRouteWarps) {
    route_step(weights, tokens, step * 16 + member * 4, x.cols, sums);
  }
#pragma unroll
  for (int i = 0; i < kRouteTiles * 4; ++i) {
    partials[warp][i / 4 * 8 + member * 2 + i % 2][group + i % 4 / 2 * 8] = sums[i / 4][i % 4];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kRouteTokens * kRouteExperts; i += kRouteWarps * kWarp) {
    float sum = 0.0f;
    for (int other = 0; other < kRouteWarps; ++other) sum += partials[other][i / kRouteExperts][i % kRouteExperts];
    totals[i / kRouteExperts][i % kRouteExperts] = sum;
  }
  auto cluster = cg::this_cluster();
  cluster.sync();
  constexpr int kOwn = kRouteTokens / kRouteSplit * kRouteExperts;
  const int at = static_cast<int>(threadIdx.x);
  const int token = at / kRouteExperts * kRouteSplit + rank;
  const int expert = first_expert + at % kRouteExperts;
  if (at < kOwn && first_token + token < rows && expert < weight.rows) {
    float sum = 0.0f;
    for (int i = 0; i < kRouteSplit; ++i) sum += cluster.map_shared_rank(&totals[token][at % kRouteExperts], i)[0];
    logits[static_cast<int64_t>(first_token + token) * weight.rows + expert] = sum;
  }
  cluster_leave_together();
}

}  // namespace glm::cuda

#endif
