/* Router scores on tensor cores at f32's precision: a weight is the exact sum of three bf16 numbers, and activations are bf16. */
#ifndef GLM_CUDA_MOE_ROUTE_LOGITS_CUH
#define GLM_CUDA_MOE_ROUTE_LOGITS_CUH

#include <cooperative_groups.h>

#include "kernel.cuh"
#include "launch.h"
#include "mma.cuh"

namespace glm::cuda {

constexpr int kRouteExperts = 16; /* of a block */
constexpr int kRouteWarps = 8;
constexpr int kRouteSplit = 8;                                       /* blocks of a cluster, which share K */
constexpr int kRouteStep = 16;                                       /* elements of K that a warp multiplies at once */
constexpr int kRouteStride = kRouteSplit * kRouteWarps * kRouteStep; /* from a step of a warp to its next */
constexpr int kRouteAhead = 5; /* steps whose weights decode reads before the predecessor ends: all of 5120 columns */

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

/* Adds a step to the warp's sums, kTiles times eight tokens. A token's sum is made in the same order
 * for every kTiles. */
template <typename W, int kTiles>
__device__ __forceinline__ void multiply_route_step(RouteWeights w, const uint2 b[kTiles], float sums[kTiles][4]) {
  constexpr int kPieces = std::is_same_v<W, bf16> ? 1 : 3;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    uint32_t a[4];
    a[0] = take_bf16(w.low.x, w.low.y);
    a[1] = take_bf16(w.high.x, w.high.y);
    a[2] = take_bf16(w.low.z, w.low.w);
    a[3] = take_bf16(w.high.z, w.high.w);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) mma_16x8x16<bf16>(sums[tile], a, b[tile].x, b[tile].y);
  }
}

/* A warp's tokens, kTiles times eight. Where rows are aligned, those of its first steps come to shared memory all at once,
 * [step][token][kRouteStep]: read step by step they would take as many trips. */
template <int kTiles>
struct RouteTokens {
  static constexpr int kStepBytes = kTiles * 8 * kRouteStep * 2;
  static constexpr int kBytes = kRouteAhead * kStepBytes; /* of a warp */

  const glm_tensor& x;
  int first;
  int end;
  uint8_t* copied; /* kBytes, or NULL */

  /* Starts the copies; zeros past the last token and column. `k`: the warp's first column. */
  __device__ __forceinline__ void copy(int k) const {
    for (int i = static_cast<int>(threadIdx.x) % kWarp; i < kRouteAhead * kTiles * 16; i += kWarp) {
      const int column = k + i / (kTiles * 16) * kRouteStride + i % 2 * 8;
      const int token = first + i / 2 % (kTiles * 8);
      const bool valid = token < end && column < x.cols;
      copy_async_16(copied + i * 16, row_of<bf16>(x, valid ? token : 0) + (valid ? column : 0), valid);
    }
    commit_copies();
  }

  /* This lane's of a step that has been copied. */
  __device__ __forceinline__ void read_copied(int step, uint2 b[kTiles]) const {
    const auto* own = reinterpret_cast<const uint2*>(copied + step * kStepBytes) + threadIdx.x % kWarp;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) b[tile] = own[tile * kWarp];
  }

  /* This lane's from column k on. */
  __device__ __forceinline__ void read(int k, uint2 b[kTiles]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int token = first + tile * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
      b[tile] = load_route_tokens(token < end ? row_of<bf16>(x, token) : nullptr, k, x.cols);
    }
  }
};

/* The warp's sums over its share of K, from `k` on. Weights are no operation's output: the first steps' are read before the
 * predecessor ends. */
template <typename W, int kTiles>
__device__ __forceinline__ void route_sums(const W* const rows[2], const RouteTokens<kTiles>& tokens, int k,
                                           bool beside, float sums[kTiles][4]) {
  const int cols = tokens.x.cols;
  const int own = k + static_cast<int>(threadIdx.x) % 4 * 4;
  const auto load = [&](int at) {
    return RouteWeights{load_route_weights(rows[0], at, cols), load_route_weights(rows[1], at, cols)};
  };
  RouteWeights ahead[kRouteAhead];
#pragma unroll
  for (int i = 0; i < kRouteAhead; ++i) ahead[i] = load(own + i * kRouteStride);
  begin_turn(beside);
  uint2 b[kTiles];
  if (tokens.copied != nullptr) {
    tokens.copy(k);
    wait_copies<0>();
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < kRouteAhead; ++i) {
    if (tokens.copied != nullptr) {
      tokens.read_copied(i, b);
    } else {
      tokens.read(own + i * kRouteStride, b);
    }
    multiply_route_step<W, kTiles>(ahead[i], b, sums);
  }
  for (int at = kRouteAhead * kRouteStride; k + at < cols; at += kRouteStride) {
    tokens.read(own + at, b);
    multiply_route_step<W, kTiles>(load(own + at), b, sums);
  }
}

template <int kTiles>
struct RouteShape {
  static constexpr int kTokens = kTiles * 8;
  using Partials = float[kRouteWarps][kTokens][kRouteExperts + 1];
  /* Partial sums take the tokens' place. */
  static constexpr int kTokenBytes = kRouteWarps * RouteTokens<kTiles>::kBytes;
  static constexpr int kSharedBytes = kTokenBytes > static_cast<int>(sizeof(Partials))
                                          ? kTokenBytes
                                          : static_cast<int>(sizeof(Partials));
};

/* Block (x, y): 16 experts times the cluster's split of K, kTiles times eight tokens. */
template <typename W, int kTiles>
__global__ void __launch_bounds__(kRouteWarps* kWarp, 2)
    route_logits_mma_kernel(const __grid_constant__ glm_tensor x, glm_weight weight, int32_t rows, bool beside,
                            bool aligned, float* logits) {
  namespace cg = cooperative_groups;
  using Shape = RouteShape<kTiles>;
  constexpr int kTokens = Shape::kTokens;
  extern __shared__ uint4 shared[];
  __shared__ float totals[kTokens][kRouteExperts];
  auto& partials = *reinterpret_cast<typename Shape::Partials*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
  const int rank = static_cast<int>(blockIdx.x) % kRouteSplit;
  const int first_expert = static_cast<int>(blockIdx.x) / kRouteSplit * kRouteExperts;
  const int first_token = static_cast<int>(blockIdx.y) * kTokens;
  const W* weights[2];
  for (int i = 0; i < 2; ++i) {
    weights[i] =
        static_cast<const W*>(weight.data) + min(first_expert + group + i * 8, weight.rows - 1) * weight.stride;
  }
  uint8_t* copied = reinterpret_cast<uint8_t*>(shared) + warp * RouteTokens<kTiles>::kBytes;
  const RouteTokens<kTiles> tokens{x, first_token, rows, aligned ? copied : nullptr};
  float sums[kTiles][4] = {};
  route_sums<W, kTiles>(weights, tokens, (rank * kRouteWarps + warp) * kRouteStep, beside, sums);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) {
    partials[warp][i / 4 * 8 + member * 2 + i % 2][group + i % 4 / 2 * 8] = sums[i / 4][i % 4];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * kRouteExperts; i += kRouteWarps * kWarp) {
    float sum = 0.0f;
    for (int other = 0; other < kRouteWarps; ++other) sum += partials[other][i / kRouteExperts][i % kRouteExperts];
    totals[i / kRouteExperts][i % kRouteExperts] = sum;
  }
  auto cluster = cg::this_cluster();
  cluster.sync();
  constexpr int kOwn = kTokens / kRouteSplit * kRouteExperts;
  const int at = static_cast<int>(threadIdx.x);
  const int token = at / kRouteExperts * kRouteSplit + rank;
  const int expert = first_expert + at % kRouteExperts;
  if (at < kOwn && first_token + token < rows && expert < weight.rows) {
    float sum = 0.0f;
    for (int i = 0; i < kRouteSplit; ++i) sum += cluster.map_shared_rank(&totals[token][at % kRouteExperts], i)[0];
    logits[static_cast<int64_t>(first_token + token) * weight.rows + expert] = sum;
  }
  cluster_leave_together();
  end_turn(beside);
}

inline bool are_route_rows_aligned(const glm_tensor& x) {
  return x.cols % 8 == 0 && x.stride % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

template <typename W, int kTiles>
glm_status launch_route_logits(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits) {
  const Grid grid{dim3(blocks_for(args.experts, kRouteExperts) * kRouteSplit, blocks_for(args.rows, kTiles * 8)),
                  kRouteWarps * kWarp, RouteShape<kTiles>::kSharedBytes, kRouteSplit, beside};
  return launch(device, "moe_route (logits)", grid, route_logits_mma_kernel<W, kTiles>, args.x, args.weight, args.rows,
                beside, are_route_rows_aligned(args.x), logits);
}

/* Into logits[rows][experts]. */
template <typename W>
glm_status route_logits(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits) {
  if (args.rows <= 8) return launch_route_logits<W, 1>(device, args, beside, logits);
  if (args.rows <= 16) return launch_route_logits<W, 2>(device, args, beside, logits);
  if (args.rows <= 32) return launch_route_logits<W, 4>(device, args, beside, logits);
  return launch_route_logits<W, 8>(device, args, beside, logits);
}

}  // namespace glm::cuda

#endif
