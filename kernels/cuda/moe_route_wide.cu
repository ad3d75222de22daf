/* Router scores of many tokens. A cluster splits K as decode's does; a block multiplies its share of K for all experts, so that it reads
 * tokens once, and each weight once for all its tokens. Sums are made in decode's order (moe_route_logits.cuh): what a warp adds up there
 * is a bucket here, and each warp goes through all buckets of its experts and tokens. */
#include "moe_route_logits.cuh"
#include "moe_route_wide.h"

namespace glm::cuda {

namespace {

constexpr int kExpertWarps = 10; /* of 16 experts each: GLM-4.7 has 160 */
constexpr int kBlockExperts = kExpertWarps * kRouteExperts;
constexpr int kStages = 4;
constexpr int kStageSteps = 4;
constexpr int kTokenBytes = kRouteStep * 2; /* of a step */

/* kTokenWarps times kExpertWarps warps: 16 experts, kTiles times eight tokens each. */
template <int kTiles, int kTokenWarps>
struct WideRoute {
  static constexpr int kTokens = kTokenWarps * kTiles * 8;
  static constexpr int kThreads = kTokenWarps * kExpertWarps * kWarp;
  static constexpr int kSums = kTiles * 4; /* of a thread */
  static constexpr int kStageBytes = kStageSteps * kTokens * kTokenBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kSums * kThreads * static_cast<int>(sizeof(float));
  static constexpr int kBlocks = kThreads <= 320 ? 2 : 1;      /* of a multiprocessor */
  static constexpr int kAhead = kTiles <= 4 ? kStageSteps : 2; /* steps whose weights are on their way */
  static_assert(kStageSteps % kAhead == 0);
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

/* Copies the tokens of the next kStageSteps steps: [step][token][kRouteStep]; zeros past the last token and column. */
template <typename Shape>
__device__ __forceinline__ void copy_stage(const glm_tensor& x, int first_token, int rows, BucketSteps& steps,
                                           uint8_t* stage) {
  constexpr int kChunks = Shape::kTokens * 2; /* of 16 bytes */
#pragma unroll
  for (int step = 0; step < kStageSteps; ++step) {
    for (int i = static_cast<int>(threadIdx.x); i < kChunks; i += Shape::kThreads) {
      const int column = steps.column + i % 2 * 8;
      const bool valid = first_token + i / 2 < rows && column < x.cols;
      const bf16* from = row_of<bf16>(x, valid ? first_token + i / 2 : 0) + (valid ? column : 0);
      copy_async_16(stage + step * Shape::kTokens * kTokenBytes + i * 16, from, valid);
    }
    steps.advance();
  }
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

/* The block's sums of its share of K into totals[sum][thread]. */
template <typename W, int kTiles, int kTokenWarps>
__device__ __forceinline__ void sum_buckets(const glm_tensor& x, const W* const weights[2], int first_token, int rows,
                                            bool beside, uint8_t* stages, float* totals) {
  using Shape = WideRoute<kTiles, kTokenWarps>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
  const int strides = (x.cols + kRouteStride - 1) / kRouteStride;
  const int first_column = static_cast<int>(blockIdx.x) % kRouteSplit * kRouteWarps * kRouteStep;
  const uint8_t* own = stages + (warp / kExpertWarps * kTiles * 8 + group) * kTokenBytes + member * 8;
  BucketSteps ahead{first_column + member * 4, 0, strides};
  const auto load_next = [&] {
    const RouteWeights w{load_route_weights(weights[0], ahead.column, x.cols),
                         load_route_weights(weights[1], ahead.column, x.cols)};
    ahead.advance();
    return w;
  };
  RouteWeights next[Shape::kAhead];
#pragma unroll
  for (int i = 0; i < Shape::kAhead; ++i) next[i] = load_next();
  begin_turn(beside);
  BucketSteps copied{first_column, 0, strides};
  const int last = kRouteWarps * strides / kStageSteps;
  const auto copy = [&](int stage) {
    if (stage < last) copy_stage<Shape>(x, first_token, rows, copied, stages + stage % kStages * Shape::kStageBytes);
    commit_copies();
  };
  for (int i = 0; i < kStages - 1; ++i) copy(i);
  float sums[kTiles][4] = {};
  BucketSteps at{first_column, 0, strides};
  bool is_first = true;
  for (int stage = 0; stage < last; ++stage) {
    wait_copies<kStages - 2>();
    __syncthreads();
    copy(stage + kStages - 1);
    const uint8_t* tokens = own + stage % kStages * Shape::kStageBytes;
#pragma unroll
    for (int step = 0; step < kStageSteps; ++step) {
      const RouteWeights w = next[step % Shape::kAhead];
      next[step % Shape::kAhead] = load_next();
      uint2 b[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        b[tile] = *reinterpret_cast<const uint2*>(tokens + (step * Shape::kTokens + tile * 8) * kTokenBytes);
      }
      multiply_route_step<W, kTiles>(w, b, sums);
      if (!at.advance()) continue;
      add_bucket<Shape, kTiles>(sums, is_first, totals);
      is_first = false;
    }
  }
}

/* Adds the cluster's totals in order of rank, an eighth of them in each block. */
template <int kTiles, int kTokenWarps>
__device__ __forceinline__ void store_logits(float* totals, int first_token, int first_expert, int rows, int experts,
                                             float* logits) {
  using Shape = WideRoute<kTiles, kTokenWarps>;
  constexpr int kShare = Shape::kSums * Shape::kThreads / kRouteSplit;
  auto cluster = cooperative_groups::this_cluster();
  for (int i = static_cast<int>(threadIdx.x); i < kShare; i += Shape::kThreads) {
    const int at = static_cast<int>(blockIdx.x) % kRouteSplit * kShare + i;
    const int thread = at % Shape::kThreads;
    const int sum_index = at / Shape::kThreads;
    const int warp = thread / kWarp;
    const int token =
        first_token + warp / kExpertWarps * kTiles * 8 + sum_index / 4 * 8 + thread % 4 * 2 + sum_index % 2;
    const int expert = first_expert + warp % kExpertWarps * kRouteExperts + thread % kWarp / 4 + sum_index % 4 / 2 * 8;
    if (token >= rows || expert >= experts) continue;
    float sum = 0.0f;
#pragma unroll
    for (int rank = 0; rank < kRouteSplit; ++rank) sum += *cluster.map_shared_rank(totals + at, rank);
    logits[static_cast<int64_t>(token) * experts + expert] = sum;
  }
}

/* Block (x, y): kBlockExperts experts times the cluster's split of K, a tile of tokens. */
template <typename W, int kTiles, int kTokenWarps>
__global__ void __launch_bounds__(WideRoute<kTiles, kTokenWarps>::kThreads, WideRoute<kTiles, kTokenWarps>::kBlocks)
    route_logits_wide_kernel(glm_tensor x, glm_weight weight, int32_t rows, bool beside, float* logits) {
  using Shape = WideRoute<kTiles, kTokenWarps>;
  extern __shared__ uint4 shared[];
  auto* stages = reinterpret_cast<uint8_t*>(shared);
  auto* totals = reinterpret_cast<float*>(stages + kStages * Shape::kStageBytes);
  const int first_expert = static_cast<int>(blockIdx.x) / kRouteSplit * kBlockExperts;
  const int first_token = static_cast<int>(blockIdx.y) * Shape::kTokens;
  const int own_expert = first_expert + static_cast<int>(threadIdx.x) / kWarp % kExpertWarps * kRouteExperts +
                         static_cast<int>(threadIdx.x) % kWarp / 4;
  const W* weights[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weights[i] = static_cast<const W*>(weight.data) + min(own_expert + i * 8, weight.rows - 1) * weight.stride;
  }
  sum_buckets<W, kTiles, kTokenWarps>(x, weights, first_token, rows, beside, stages, totals);
  cooperative_groups::this_cluster().sync();
  store_logits<kTiles, kTokenWarps>(totals, first_token, first_expert, rows, weight.rows, logits);
  cluster_leave_together();
  end_turn(beside);
}

template <typename W, int kTiles, int kTokenWarps>
glm_status launch_wide(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits) {
  using Shape = WideRoute<kTiles, kTokenWarps>;
  const Grid grid{dim3(blocks_for(args.experts, kBlockExperts) * kRouteSplit, blocks_for(args.rows, Shape::kTokens)),
                  Shape::kThreads, Shape::kSharedBytes, kRouteSplit, beside};
  return launch(device, "moe_route (logits)", grid, route_logits_wide_kernel<W, kTiles, kTokenWarps>, args.x,
                args.weight, args.rows, beside, logits);
}

}  // namespace

bool are_route_logits_wide(const glm_moe_route_args& args) {
  constexpr int kWideFrom = 256; /* rows */
  return args.rows >= kWideFrom && args.x.dtype == GLM_BF16 && are_route_rows_aligned(args.x);
}

template <typename W>
glm_status route_logits_wide(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits) {
  if (args.rows <= 512) return launch_wide<W, 4, 1>(device, args, beside, logits);
  return launch_wide<W, 8, 1>(device, args, beside, logits);
}

template glm_status route_logits_wide<float>(glm_device*, const glm_moe_route_args&, bool, float*);
template glm_status route_logits_wide<bf16>(glm_device*, const glm_moe_route_args&, bool, float*);
template glm_status route_logits_wide<f16>(glm_device*, const glm_moe_route_args&, bool, float*);

}  // namespace glm::cuda
