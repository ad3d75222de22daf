/* Router scores of many tokens on Hopper (moe_route_tile.cuh). Of a few hundred tokens a cluster splits K as decode's does; of more, a block goes
 * through all of it. */
#include "moe_route_multiply.cuh"
#include "moe_route_wide.h"
#include "tensor_map.h"

namespace glm::cuda {

namespace {

/* Calls f(token, expert, values) for each pair of the thread's sums: experts `expert` and the next. */
template <typename Shape, typename F>
__device__ __forceinline__ void for_each_pair(const float result[Shape::kSums], F&& f) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < Shape::kSums; i += 2) {
    f(thread / kWarp * 16 + thread % kWarp / 4 + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2,
      make_float2(result[i], result[i + 1]));
  }
}

struct LogitsTile {
  float* logits;
  int first_token;
  int first_expert;
  int rows;
  int experts;

  __device__ __forceinline__ void store(int token, int expert, float2 values) const {
    if (first_token + token >= rows) return;
    float* to = logits + static_cast<int64_t>(first_token + token) * experts + first_expert + expert;
    if (first_expert + expert < experts) to[0] = values.x;
    if (first_expert + expert + 1 < experts) to[1] = values.y;
  }
};

/* Adds the cluster's totals in order of rank, an eighth of them in each block. */
template <typename Shape, int kExperts>
__device__ __forceinline__ void store_cluster_sums(float* totals, const LogitsTile& tile) {
  constexpr int kShare = Shape::kTokens * kExperts / kRouteSplit / 2;
  auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const int rank = static_cast<int>(blockIdx.x) % kRouteSplit;
  for (int i = static_cast<int>(threadIdx.x); i < kShare; i += Shape::kThreads) {
    const int at = (rank * kShare + i) * 2;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int other = 0; other < kRouteSplit; ++other) {
      const float2 part = *reinterpret_cast<const float2*>(cluster.map_shared_rank(totals, other) + at);
      sum.x += part.x;
      sum.y += part.y;
    }
    tile.store(at / kExperts, at % kExperts, sum);
  }
  cluster_leave_together();
}

/* Block (x, y): kExperts experts times the cluster's split of K, a tile of tokens. */
template <typename W, int kGroups, int kExperts, int kRanks>
__global__ void __launch_bounds__(WideRoute<W, kGroups, kExperts, kRanks>::kThreads, 1)
    route_logits_wide_kernel(const __grid_constant__ WideRouteParams p) {
  using Shape = WideRoute<W, kGroups, kExperts, kRanks>;
  constexpr int kClusterBlocks = kRouteSplit / kRanks;
  extern __shared__ uint4 shared[];
  __shared__ Ring<2> token_ring;
  __shared__ Ring<kSlots> slot_ring;
  uint8_t* boxes = swizzle_aligned(reinterpret_cast<uint8_t*>(shared));
  const RoutePipe<Shape> pipe{&token_ring, &slot_ring, boxes, boxes + 2 * p.strides * Shape::kBoxBytes, p.strides};
  pipe.init();
  const int thread = static_cast<int>(threadIdx.x);
  const int rank = static_cast<int>(blockIdx.x) % kClusterBlocks;
  const LogitsTile tile{p.logits, static_cast<int>(blockIdx.y) * Shape::kTokens,
                        static_cast<int>(blockIdx.x) / kClusterBlocks * kExperts, p.rows, p.weight.rows};
  auto* totals = reinterpret_cast<float*>(boxes); /* [token][expert] */
  if (thread < Shape::kMultiplyThreads) {
    begin_turn(p.beside);
    float result[Shape::kSums];
    multiply_shares<Shape>(result, pipe);
    if (kRanks == 1) named_barrier(kMultiplyBarrier, Shape::kMultiplyThreads); /* tokens make room for totals */
    for_each_pair<Shape>(result, [&](int token, int expert, float2 values) {
      if (kRanks == 1) {
        *reinterpret_cast<float2*>(totals + token * kExperts + expert) = values;
      } else {
        tile.store(token, expert, values);
      }
    });
  } else if (thread < Shape::kThreads - kWarp) {
    convert_weights<Shape>(p, pipe, tile.first_expert, rank);
  } else if (thread == Shape::kThreads - kWarp) {
    prefetch_map(&p.x);
    begin_turn(p.beside);
    copy_tokens<Shape>(p, pipe, tile.first_token, rank);
  }
  __syncthreads();
  if (kRanks == 1) store_cluster_sums<Shape, kExperts>(totals, tile);
  end_turn(p.beside);
}

template <typename W, int kGroups, int kExperts, int kRanks>
glm_status launch_wide(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits) {
  using Shape = WideRoute<W, kGroups, kExperts, kRanks>;
  constexpr int kElement = 2;
  const int strides = static_cast<int>(blocks_for(args.x.cols, kRouteStride));
  WideRouteParams p{args.weight, logits, args.rows, args.x.cols, strides, beside, {}};
  const glm_status status = encode_map(device, "x", &p.x, args.x.data, args.rows, args.x.cols * kElement,
                                       args.x.stride * kElement, Shape::kTokens);
  if (status != GLM_OK) return status;
  const int cluster = kRouteSplit / kRanks;
  const Grid grid{dim3(blocks_for(args.experts, kExperts) * cluster, blocks_for(args.rows, Shape::kTokens)),
                  Shape::kThreads, static_cast<size_t>(Shape::shared_bytes(strides)), cluster, beside};
  return launch(device, "moe_route (logits)", grid, route_logits_wide_kernel<W, kGroups, kExperts, kRanks>, p);
}

}  // namespace

template <typename W>
bool are_route_logits_wide(const glm_device* device, const glm_moe_route_args& args) {
  constexpr int kWideFrom = 65; /* rows */
  const glm_weight& weight = args.weight;
  return device->has_wgmma && args.rows >= kWideFrom && args.x.dtype == GLM_BF16 && are_route_rows_aligned(args.x) &&
         args.x.cols <= kStrides * kRouteStride && weight.stride * sizeof(W) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(weight.data) % 16 == 0;
}

template <typename W>
glm_status route_logits_wide(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits) {
  /* Of GLM-4.7's 160 experts on 132 multiprocessors, which take a block each: one turn of 15 clusters, two of them, one of 132 blocks. */
  if (args.rows <= 320) return launch_wide<W, 1, 56, 1>(device, args, beside, logits);
  if (args.rows <= 1280) return launch_wide<W, 2, 56, 1>(device, args, beside, logits);
  if (args.rows <= 2112) return launch_wide<W, 1, 40, kRouteSplit>(device, args, beside, logits);
  return launch_wide<W, 2, 40, kRouteSplit>(device, args, beside, logits);
}

template bool are_route_logits_wide<float>(const glm_device*, const glm_moe_route_args&);
template bool are_route_logits_wide<bf16>(const glm_device*, const glm_moe_route_args&);
template bool are_route_logits_wide<f16>(const glm_device*, const glm_moe_route_args&);
template glm_status route_logits_wide<float>(glm_device*, const glm_moe_route_args&, bool, float*);
template glm_status route_logits_wide<bf16>(glm_device*, const glm_moe_route_args&, bool, float*);
template glm_status route_logits_wide<f16>(glm_device*, const glm_moe_route_args&, bool, float*);

}  // namespace glm::cuda
