/* Router scores of many tokens. A cluster splits K as decode's does; a block multiplies its share of K for all experts, so that it reads
 * tokens once, and each weight once for all its tokens. Sums are made in decode's order (moe_route_logits.cuh): what a warp adds up there
 * is a bucket here, and each warp goes through all buckets of its experts and tokens. */
#include "moe_route_logits.cuh"
#include "moe_route_wide.h"

namespace glm::cuda {

namespace {

constexpr int kExpertWarps = 10; /* of 16 experts each: GLM-4.7 has 160 */
constexpr int kBlockExperts = kExpertWarps * kRouteExperts;
constexpr int kStages = 3;
constexpr int kTokenBytes = kRouteStep * 2; /* of a step */

/* A block: kTiles times eight tokens, which each warp multiplies by 16 experts. Stages hold [step][token][kRouteStep] and
 * [step][expert][kRouteStep]. For many tokens two blocks share a multiprocessor. */
template <typename W, int kTiles>
struct WideRoute {
  static constexpr int kTokens = kTiles * 8;
  static constexpr int kThreads = kExpertWarps * kWarp;
  static constexpr int kSums = kTiles * 4; /* of a thread */
  static constexpr int kStageSteps = kTiles <= 4 ? 4 : 2;
  static constexpr int kWeightBytes = kRouteStep * static_cast<int>(sizeof(W)); /* of a step */
  static constexpr int kStepBytes = kTokens * kTokenBytes + kBlockExperts * kWeightBytes;
  static constexpr int kStageBytes = kStageSteps * kStepBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kSums * kThreads * static_cast<int>(sizeof(float));
  static constexpr int kBlocks = kTiles <= 4 ? 1 : 2; /* of a multiprocessor */
};

/* Where the steps of a block lie: all of a bucket, then the next bucket's. */
struct BucketSteps {
  int column;
  int index = 0;
  int count; /* of a bucket */

  /* Whether that ends a bucket. */
  __device__ __forceinline__ bool advance() {
    column += kRouteStride;
    if (++index < count) return false;
    index = 0;
    column += kRouteStep - count * kRouteStride;
    return true;
  }
};

/* Copies rows [first, end) of a step, kRows of them; zeros past the last row and column. */
template <int kRows, int kThreads, typename T>
__device__ __forceinline__ void copy_rows(const T* data, int64_t stride, int first, int end, int column, int cols,
                                          uint8_t* to) {
  constexpr int kChunks = kRouteStep * static_cast<int>(sizeof(T)) / 16; /* of a row */
  constexpr int kElements = kRouteStep / kChunks;
#pragma unroll
  for (int base = 0; base < kRows * kChunks; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    if (kRows * kChunks % kThreads != 0 && i >= kRows * kChunks) return;
    const int row = first + i / kChunks;
    const int at = column + i % kChunks * kElements;
    const bool valid = row < end && at < cols;
    copy_async_16(to + i * 16, data + (valid ? row * stride + at : 0), valid);
  }
}

/* Four weights of a step, in the order that a lane multiplies them. */
__device__ __forceinline__ float4 read_weights(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
template <typename W>
__device__ __forceinline__ float4 read_weights(const W* from) {
  return make_float4(to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3]));
}

/* Adds a bucket's sums to the thread's own, totals[sum][thread]. */
template <typename Shape, int kTiles>
__device__ __forceinline__ void add_bucket(float sums[kTiles][4], bool is_first, float* totals) {
#pragma unroll
  for (int i = 0; i < Shape::kSums; ++i) {
    float& total = totals[i * Shape::kThreads + threadIdx.x];
    total = (is_first ? 0.0f : total) + sums[i / 4][i % 4];
    sums[i / 4][i % 4] = 0.0f;
  }
}

/* Sends the block's steps through the stages. Weights are no operation's output: those of the first stages are on their way before the
 * predecessor ends. */
template <typename W, int kTiles>
struct StageCopies {
  using Shape = WideRoute<W, kTiles>;

  const glm_tensor& x;
  const glm_weight& weight;
  int first_token;
  int rows;
  int first_expert;
  uint8_t* stages;
  BucketSteps weights;
  BucketSteps tokens;

  __device__ __forceinline__ uint8_t* step(int stage, int i) const {
    return stages + stage % kStages * Shape::kStageBytes + i * Shape::kStepBytes;
  }
  __device__ __forceinline__ void copy_weights(int stage) {
#pragma unroll
    for (int i = 0; i < Shape::kStageSteps; ++i) {
      copy_rows<kBlockExperts, Shape::kThreads>(static_cast<const W*>(weight.data), weight.stride, first_expert,
                                                weight.rows, weights.column, x.cols,
                                                step(stage, i) + Shape::kTokens * kTokenBytes);
      weights.advance();
    }
  }
  __device__ __forceinline__ void copy_tokens(int stage) {
#pragma unroll
    for (int i = 0; i < Shape::kStageSteps; ++i) {
      copy_rows<Shape::kTokens, Shape::kThreads>(static_cast<const bf16*>(x.data), x.stride, first_token, rows,
                                                 tokens.column, x.cols, step(stage, i));
      tokens.advance();
    }
  }
};

/* The block's sums of its share of K into totals[sum][thread]. */
template <typename W, int kTiles>
__device__ __forceinline__ void sum_buckets(StageCopies<W, kTiles> copies, int strides, bool beside, float* totals) {
  using Shape = WideRoute<W, kTiles>;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
  const int own_expert = static_cast<int>(threadIdx.x) / kWarp * kRouteExperts + group;
  const int own_token = group * kTokenBytes + member * 8;
  const int own_weight =
      Shape::kTokens * kTokenBytes + own_expert * Shape::kWeightBytes + member * Shape::kWeightBytes / 4;
  const int last = kRouteWarps * strides / Shape::kStageSteps;
  for (int i = 0; i < kStages - 1; ++i) copies.copy_weights(i);
  begin_turn(beside);
  for (int i = 0; i < kStages - 1; ++i) {
    copies.copy_tokens(i);
    commit_copies(); /* the first group has the weights of all */
  }
  float sums[kTiles][4] = {};
  BucketSteps at{0, 0, strides};
  bool is_first = true;
  for (int stage = 0; stage < last; ++stage) {
    wait_copies<kStages - 2>();
    __syncthreads();
    if (stage + kStages - 1 < last) {
      copies.copy_weights(stage + kStages - 1);
      copies.copy_tokens(stage + kStages - 1);
    }
    commit_copies();
#pragma unroll
    for (int i = 0; i < Shape::kStageSteps; ++i) {
      const uint8_t* step = copies.step(stage, i);
      const RouteWeights w{
          read_weights(reinterpret_cast<const W*>(step + own_weight)),
          read_weights(reinterpret_cast<const W*>(step + own_weight + kRouteExperts / 2 * Shape::kWeightBytes))};
      uint2 b[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        b[tile] = *reinterpret_cast<const uint2*>(step + own_token + tile * 8 * kTokenBytes);
      }
      multiply_route_step<W, kTiles>(w, b, sums);
      if (!at.advance()) continue;
      add_bucket<Shape, kTiles>(sums, is_first, totals);
      is_first = false;
    }
  }
}

/* Adds the cluster's totals in order of rank, an eighth of them in each block. */
template <typename Shape>
__device__ __forceinline__ void store_logits(float* totals, int first_token, int first_expert, int rows, int experts,
                                             float* logits) {
  constexpr int kShare = Shape::kSums * Shape::kThreads / kRouteSplit;
  auto cluster = cooperative_groups::this_cluster();
  for (int i = static_cast<int>(threadIdx.x); i < kShare; i += Shape::kThreads) {
    const int at = static_cast<int>(blockIdx.x) % kRouteSplit * kShare + i;
    const int thread = at % Shape::kThreads;
    const int sum_index = at / Shape::kThreads;
    const int warp = thread / kWarp;
    const int token = first_token + sum_index / 4 * 8 + thread % 4 * 2 + sum_index % 2;
    const int expert = first_expert + warp * kRouteExperts + thread % kWarp / 4 + sum_index % 4 / 2 * 8;
    if (token >= rows || expert >= experts) continue;
    float sum = 0.0f;
#pragma unroll
    for (int rank = 0; rank < kRouteSplit; ++rank) sum += *cluster.map_shared_rank(totals + at, rank);
    logits[static_cast<int64_t>(token) * experts + expert] = sum;
  }
}

/* Block (x, y): kBlockExperts experts times the cluster's split of K, a tile of tokens. */
template <typename W, int kTiles>
__global__ void __launch_bounds__(WideRoute<W, kTiles>::kThreads, WideRoute<W, kTiles>::kBlocks)
    route_logits_wide_kernel(const __grid_constant__ glm_tensor x, const __grid_constant__ glm_weight weight,
                             int32_t rows, bool beside, float* logits) {
  using Shape = WideRoute<W, kTiles>;
  extern __shared__ uint4 shared[];
  auto* stages = reinterpret_cast<uint8_t*>(shared);
  auto* totals = reinterpret_cast<float*>(stages + kStages * Shape::kStageBytes);
  const int first_expert = static_cast<int>(blockIdx.x) / kRouteSplit * kBlockExperts;
  const int first_token = static_cast<int>(blockIdx.y) * Shape::kTokens;
  const int strides = (x.cols + kRouteStride - 1) / kRouteStride;
  const BucketSteps first{static_cast<int>(blockIdx.x) % kRouteSplit * kRouteWarps * kRouteStep, 0, strides};
  const StageCopies<W, kTiles> copies{x, weight, first_token, rows, first_expert, stages, first, first};
  sum_buckets<W, kTiles>(copies, strides, beside, totals);
  cooperative_groups::this_cluster().sync();
  store_logits<Shape>(totals, first_token, first_expert, rows, weight.rows, logits);
  cluster_leave_together();
  end_turn(beside);
}

template <typename W, int kTiles>
glm_status launch_wide(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits) {
  using Shape = WideRoute<W, kTiles>;
  const Grid grid{dim3(blocks_for(args.experts, kBlockExperts) * kRouteSplit, blocks_for(args.rows, Shape::kTokens)),
                  Shape::kThreads, Shape::kSharedBytes, kRouteSplit, beside};
  return launch(device, "moe_route (logits)", grid, route_logits_wide_kernel<W, kTiles>, args.x, args.weight, args.rows,
                beside, logits);
}

}  // namespace

template <typename W>
bool are_route_logits_wide(const glm_moe_route_args& args) {
  constexpr int kWideFrom = 256; /* rows */
  const glm_weight& weight = args.weight;
  return args.rows >= kWideFrom && args.x.dtype == GLM_BF16 && are_route_rows_aligned(args.x) &&
         weight.stride * sizeof(W) % 16 == 0 && reinterpret_cast<uintptr_t>(weight.data) % 16 == 0;
}

template <typename W>
glm_status route_logits_wide(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits) {
  if (args.rows <= 512) return launch_wide<W, 4>(device, args, beside, logits);
  return launch_wide<W, 8>(device, args, beside, logits);
}

template bool are_route_logits_wide<float>(const glm_moe_route_args&);
template bool are_route_logits_wide<bf16>(const glm_moe_route_args&);
template bool are_route_logits_wide<f16>(const glm_moe_route_args&);
template glm_status route_logits_wide<float>(glm_device*, const glm_moe_route_args&, bool, float*);
template glm_status route_logits_wide<bf16>(glm_device*, const glm_moe_route_args&, bool, float*);
template glm_status route_logits_wide<f16>(glm_device*, const glm_moe_route_args&, bool, float*);

}  // namespace glm::cuda
