/* Router scores on tensor cores: a cluster of blocks splits K. */
#ifndef GLM_CUDA_MOE_ROUTE_LOGITS_CUH
#define GLM_CUDA_MOE_ROUTE_LOGITS_CUH

#include <cooperative_groups.h>

#include "cluster_sum.cuh"
#include "launch.h"
#include "moe_route_step.cuh"

namespace glm::cuda {

/* A warp's tokens, kTiles times eight. Where rows are aligned, those of its first steps come all at once, many to shared memory,
 * [step][token][kRouteStep]: read step by step they would take as many trips. */
template <int kTiles>
struct RouteTokens {
  static constexpr int kStepBytes = kTiles * 8 * kRouteStep * 2;
  static constexpr int kBytes = kTiles <= kFewTiles ? 0 : kRouteAhead * kStepBytes; /* of a warp */

  const glm_tensor& x;
  int first;
  int end;
  bool aligned;
  uint8_t* copied; /* kBytes */

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

  /* This lane's of the first steps; zeros likewise. `k`: the lane's first column. */
  __device__ __forceinline__ void read_ahead(int k, uint2 b[kRouteAhead][kTiles]) const {
#pragma unroll
    for (int i = 0; i < kRouteAhead; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int token = first + tile * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
        const int column = k + i * kRouteStride;
        const bool valid = token < end && column < x.cols;
        b[i][tile] = make_uint2(0, 0);
        if (valid) b[i][tile] = __ldcg(reinterpret_cast<const uint2*>(row_of<bf16>(x, token) + column));
      }
    }
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

/* The first steps of a few tokens: weights are split before the predecessor ends. `load(column)` gives weights, `k` is the lane's first
 * column. */
template <typename W, int kTiles, typename Load>
__device__ __forceinline__ void multiply_few_ahead(const RouteTokens<kTiles>& tokens, Load&& load, int k, bool beside,
                                                   float sums[kTiles][4]) {
  RouteWeights read[kRouteAhead];
  RoutePieces<W> ahead[kRouteAhead];
#pragma unroll
  for (int i = 0; i < kRouteAhead; ++i) read[i] = load(k + i * kRouteStride);
#pragma unroll
  for (int i = 0; i < kRouteAhead; ++i) {
    ahead[i] = split_weights<W>(read[i]);
#pragma unroll
    for (auto& a : ahead[i].a) asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])); /* now, not later */
  }
  begin_turn(beside);
  uint2 b[kRouteAhead][kTiles];
  if (tokens.aligned) {
    tokens.read_ahead(k, b);
  } else {
#pragma unroll
    for (int i = 0; i < kRouteAhead; ++i) tokens.read(k + i * kRouteStride, b[i]);
  }
#pragma unroll
  for (int i = 0; i < kRouteAhead; ++i) multiply_route_step<W, kTiles>(ahead[i], b[i], sums);
}

/* The first steps of many tokens. `warp_k`: the warp's first column. */
template <typename W, int kTiles, typename Load>
__device__ __forceinline__ void multiply_many_ahead(const RouteTokens<kTiles>& tokens, Load&& load, int k, int warp_k,
                                                    bool beside, float sums[kTiles][4]) {
  RouteWeights ahead[kRouteAhead];
#pragma unroll
  for (int i = 0; i < kRouteAhead; ++i) ahead[i] = load(k + i * kRouteStride);
  begin_turn(beside);
  if (tokens.aligned) {
    tokens.copy(warp_k);
    wait_copies<0>();
    __syncwarp();
  }
  uint2 b[kTiles];
#pragma unroll
  for (int i = 0; i < kRouteAhead; ++i) {
    if (tokens.aligned) {
      tokens.read_copied(i, b);
    } else {
      tokens.read(k + i * kRouteStride, b);
    }
    multiply_route_step<W, kTiles>(split_weights<W>(ahead[i]), b, sums);
  }
}

/* The warp's sums over its share of K, from `warp_k` on. Weights are no operation's output: the first steps' are read before the
 * predecessor ends. */
template <typename W, int kTiles>
__device__ __forceinline__ void route_sums(const W* const rows[2], const RouteTokens<kTiles>& tokens, int warp_k,
                                           bool beside, float sums[kTiles][4]) {
  const int cols = tokens.x.cols;
  const int k = warp_k + static_cast<int>(threadIdx.x) % 4 * 4;
  const auto load = [&](int at) {
    return RouteWeights{load_route_weights(rows[0], at, cols), load_route_weights(rows[1], at, cols)};
  };
  if constexpr (kTiles <= kFewTiles) {
    multiply_few_ahead<W, kTiles>(tokens, load, k, beside, sums);
  } else {
    multiply_many_ahead<W, kTiles>(tokens, load, k, warp_k, beside, sums);
  }
  uint2 b[kTiles];
  for (int at = kRouteAhead * kRouteStride; warp_k + at < cols; at += kRouteStride) {
    tokens.read(k + at, b);
    multiply_route_step<W, kTiles>(split_weights<W>(load(k + at)), b, sums);
  }
}

template <int kTiles>
struct RouteShape {
  static constexpr int kTokens = kTiles * 8;
  static constexpr int kOwn = kTokens / kRouteSplit * kRouteExperts; /* sums of the cluster's that a block makes */
  static constexpr bool kSends = kTiles <= kFewTiles;
  using Partials = float[kRouteWarps][kTokens][kRouteExperts + 1];
  /* Partial sums take the tokens' place. */
  static constexpr int kTokenBytes = kRouteWarps * RouteTokens<kTiles>::kBytes;
  static constexpr int kSharedBytes = kTokenBytes > static_cast<int>(sizeof(Partials))
                                          ? kTokenBytes
                                          : static_cast<int>(sizeof(Partials));
};

/* What blocks of a cluster give each other: sums that each has sent, or that each may fetch. */
template <int kTiles>
struct RouteExchange {
  float sums[kRouteSplit][RouteShape<kTiles>::kOwn];
  uint64_t arrived;
};

/* Adds up the block's partial sums, then the cluster's: calls store(token, expert, sum) for every eighth token. count: of the tokens. */
template <int kTiles, typename Store>
__device__ __forceinline__ void add_up_route(const typename RouteShape<kTiles>::Partials& partials,
                                             RouteExchange<kTiles>& exchange, int rank, int count, Store&& store) {
  using Shape = RouteShape<kTiles>;
  if (Shape::kSends) cluster_wait();
  for (int i = static_cast<int>(threadIdx.x); i < count * kRouteExperts; i += kRouteWarps * kWarp) {
    const int token = i / kRouteExperts;
    const int expert = i % kRouteExperts;
    const int to = token % kRouteSplit;
    const int place = token / kRouteSplit * kRouteExperts + expert;
    float sum = 0.0f;
    for (int other = 0; other < kRouteWarps; ++other) sum += partials[other][token][expert];
    if (Shape::kSends) {
      send_sum(&exchange.sums[rank][place], &exchange.arrived, to, sum);
    } else {
      exchange.sums[to][place] = sum;
    }
  }
  if (!Shape::kSends) cluster_sync();
  const int at = static_cast<int>(threadIdx.x);
  const int token = at / kRouteExperts * kRouteSplit + rank;
  if (at < Shape::kOwn && token < count) {
    if (Shape::kSends) barrier_wait_cluster(&exchange.arrived, 0);
    const auto cluster = cooperative_groups::this_cluster();
    float sum = 0.0f;
    for (int i = 0; i < kRouteSplit; ++i) {
      sum += Shape::kSends ? exchange.sums[i][at] : *cluster.map_shared_rank(&exchange.sums[rank][at], i);
    }
    store(token, at % kRouteExperts, sum);
  }
  if (!Shape::kSends) cluster_leave_together();
}

/* Block (x, y): 16 experts times the cluster's split of K, kTiles times eight tokens. */
template <typename W, int kTiles>
__global__ void __launch_bounds__(kRouteWarps* kWarp, 2)
    route_logits_mma_kernel(const __grid_constant__ glm_tensor x, glm_weight weight, int32_t rows, bool beside,
                            bool aligned, float* logits) {
  using Shape = RouteShape<kTiles>;
  extern __shared__ uint4 shared[];
  __shared__ RouteExchange<kTiles> exchange;
  auto& partials = *reinterpret_cast<typename Shape::Partials*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
  const int rank = static_cast<int>(blockIdx.x) % kRouteSplit;
  const int first_expert = static_cast<int>(blockIdx.x) / kRouteSplit * kRouteExperts;
  const int first_token = static_cast<int>(blockIdx.y) * Shape::kTokens;
  const int count = min(Shape::kTokens, rows - first_token);
  if (Shape::kSends) {
    const int own_tokens = (count + kRouteSplit - 1 - rank) / kRouteSplit;
    if (threadIdx.x == 0) expect_sums(&exchange.arrived, own_tokens * kRouteExperts * kRouteSplit * sizeof(float));
    __syncwarp();
    cluster_arrive_started();
  }
  const W* weights[2];
  for (int i = 0; i < 2; ++i) {
    weights[i] =
        static_cast<const W*>(weight.data) + min(first_expert + group + i * 8, weight.rows - 1) * weight.stride;
  }
  uint8_t* copied = reinterpret_cast<uint8_t*>(shared) + warp * RouteTokens<kTiles>::kBytes;
  const RouteTokens<kTiles> tokens{x, first_token, rows, aligned, copied};
  float sums[kTiles][4] = {};
  route_sums<W, kTiles>(weights, tokens, (rank * kRouteWarps + warp) * kRouteStep, beside, sums);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) {
    partials[warp][i / 4 * 8 + member * 2 + i % 2][group + i % 4 / 2 * 8] = sums[i / 4][i % 4];
  }
  __syncthreads();
  add_up_route<kTiles>(partials, exchange, rank, count, [&](int token, int expert, float sum) {
    if (first_expert + expert >= weight.rows) return;
    logits[static_cast<int64_t>(first_token + token) * weight.rows + first_expert + expert] = sum;
  });
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
