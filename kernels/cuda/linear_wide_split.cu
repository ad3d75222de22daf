/* Linear layers of a few hundred tokens on Hopper where decode splits K, and of bf16: a cluster splits K as decode's does, and its blocks take
 * 128 channels times 128 (FP8) or 256 tokens (bf16) each. bf16, where a cluster has room for two such splits: they take neighbouring channels of
 * the same tokens, and each block copies half of its tokens to both. Sums are those of wgmma_tile.cuh. */
#include "linear_tile.cuh"
#include "tensor_map.h"
#include "wide_tile.cuh"

namespace glm::cuda {

namespace {

constexpr int kSplitThreads = kMultiplyThreads + kWarp;
constexpr int kPitch = kWideChannels + 4; /* of partial sums, which take the place of the stages */

template <Operand kOperand, int kTokens>
struct SplitShape {
  static constexpr bool kExact = kOperand == Operand::kBf16; /* wgmma adds in f32: no sum of a step takes registers */
  static constexpr int kChunks = kTokens / kChunkTokens;
  static constexpr int kMaxSharers = kChunks; /* for 128 tokens sharing does not pay */
  static constexpr int kStages = kChunks == 1 ? 6 : 4;
  static constexpr int kStageBytes = (kWideChannels + kTokens) * kStepBytes;
  static constexpr int kSharedBytes = kSwizzleAlignment + kStages * kStageBytes;
  static_assert(kTokens * kPitch * static_cast<int>(sizeof(float)) <= kStages * kStageBytes);
};

struct SplitParams {
  LinearParams linear;
  int sharers;  /* blocks of a cluster that multiply the same tokens and steps */
  int box_rows; /* tokens that each of them copies: of a tile's, or of all */
  CUtensorMap x;
  CUtensorMap weights[GLM_MAX_PARTS];
};

template <typename Shape>
struct SplitPipe {
  using Place = RingPlace<Shape::kStages>;
  Ring<Shape::kStages>* ring;
  uint8_t* stages;

  __device__ __forceinline__ uint8_t* weights(const Place& at) const { return stages + at.stage * Shape::kStageBytes; }
  __device__ __forceinline__ uint8_t* tokens(const Place& at) const { return weights(at) + kWideChannels * kStepBytes; }

  /* By a multiplying warp that is done with the stage: sharers fill it together. */
  __device__ __forceinline__ void release(const SplitParams& p, const Place& at) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (lane >= p.sharers) return;
    if constexpr (Shape::kMaxSharers == 1) {
      barrier_arrive(&ring->empty[at.stage]);
    } else {
      const int rank = static_cast<int>(cluster_rank()) % p.linear.split;
      barrier_arrive_at(&ring->empty[at.stage], lane * p.linear.split + rank);
    }
  }
};

/* By one thread. The first weights are on their way before the predecessor's end. */
template <typename Shape>
__device__ __forceinline__ void copy_steps(const SplitParams& p, const TilePlace& place, StepRange steps,
                                           const SplitPipe<Shape>& pipe) {
  using Place = typename SplitPipe<Shape>::Place;
  const CUtensorMap* map = &p.weights[place.part];
  const auto copy_weights = [&](int step, const Place& at) {
    uint64_t* full = &pipe.ring->full[at.stage];
    barrier_expect(full, (kWideChannels + p.sharers * p.box_rows) * kStepBytes);
    copy_box(pipe.weights(at), map, step * kStepBytes, place.channel, full);
  };
  const int ahead = min(steps.first + Shape::kStages, steps.last);
  Place at;
  for (int step = steps.first; step < ahead; ++step, at.advance()) copy_weights(step, at);
  prefetch_map(&p.x);
  wait_for_predecessor();
  const auto blocks = static_cast<uint16_t>((p.sharers > 1 ? 1 << p.linear.split | 1 : 1) << place.rank);
  const int first = static_cast<int>(cluster_rank()) / p.linear.split * p.box_rows;
  at = {};
  for (int step = steps.first; step < steps.last; ++step, at.advance()) {
    if (step >= ahead) {
      pipe.ring->wait_empty(at);
      copy_weights(step, at);
    }
    uint64_t* full = &pipe.ring->full[at.stage];
    if constexpr (Shape::kMaxSharers == 1) {
      copy_box(pipe.tokens(at), &p.x, step * kStepBytes, place.token, full);
    } else {
      copy_box(pipe.tokens(at) + first * kStepBytes, &p.x, step * kStepBytes, place.token + first, full, blocks);
    }
  }
}

/* By a multiplying warpgroup: the sums of its 64 channels. While it waits for its multiplies the other's run. */
template <typename Shape>
__device__ __forceinline__ void multiply_steps(WideSums<Shape::kChunks>& sums, const SplitParams& p, StepRange steps,
                                               const SplitPipe<Shape>& pipe) {
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  typename SplitPipe<Shape>::Place at;
  clear<Shape::kChunks>(sums);
  for (int step = steps.first; step < steps.last; ++step, at.advance()) {
    pipe.ring->wait_full(at);
    const uint8_t* weights = pipe.weights(at) + group * kWgmmaWeightBytes;
    if constexpr (Shape::kExact) wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      const uint8_t* tokens = pipe.tokens(at) + chunk * kChunkBytes;
      if constexpr (Shape::kExact) {
        start_step<Operand::kBf16, kChunkTokens>(sums[chunk], weights, tokens);
      } else {
        multiply_chunk<kChunkTokens>(sums[chunk], weights, tokens);
      }
    }
    if constexpr (Shape::kExact) {
      wgmma_commit();
      wgmma_wait<0>();
    }
    pipe.release(p, at);
  }
}

/* partials[token][channel] */
__device__ __forceinline__ void store_wide_partials(const float* sums, float* partials) {
  const int channel = static_cast<int>(threadIdx.x) / kWarp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < kChunkTokens / 2; ++i) {
    partials[(i / 4 * 8 + member * 2 + i % 2) * kPitch + channel + i / 2 % 2 * 8] = sums[i];
  }
}

template <Operand kOperand, typename Shape>
__device__ __forceinline__ void multiply_tile(const SplitParams& p, const TilePlace& place, StepRange steps,
                                              const SplitPipe<Shape>& pipe, float* row_scales) {
  const int thread = static_cast<int>(threadIdx.x);
  float own_scale = 1.0f;
  if constexpr (!Shape::kExact) {
    wait_for_predecessor();
    own_scale = *row_of<float>(p.linear.x_scale, min(place.token + thread, p.linear.rows - 1));
  }
  WideSums<Shape::kChunks> sums;
  multiply_steps<Shape>(sums, p, steps, pipe);
  if (thread < Shape::kChunks * kChunkTokens) row_scales[thread] = own_scale;
  named_barrier(kWideBarrier, kMultiplyThreads); /* the stages make room for the partial sums */
#pragma unroll
  for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
    store_wide_partials(sums[chunk], reinterpret_cast<float*>(pipe.stages) + chunk * kChunkTokens * kPitch);
  }
}

template <Operand kOperand, int kTokens>
__global__ void __launch_bounds__(kSplitThreads, 1) linear_wide_split_kernel(const __grid_constant__ SplitParams p) {
  using Shape = SplitShape<kOperand, kTokens>;
  extern __shared__ uint4 shared[];
  __shared__ Ring<Shape::kStages> ring;
  __shared__ float row_scales[kTokens];
  release_successor();
  const SplitPipe<Shape> pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  if (threadIdx.x == 0) ring.init(1, p.sharers * kMultiplyThreads / kWarp);
  __syncthreads();
  if (p.sharers > 1) cluster_sync();
  const TilePlace place = tile_place(p.linear, kTokens);
  const int first = place.rank * p.linear.steps_per_block;
  const StepRange steps{first, min(first + p.linear.steps_per_block, (p.linear.k_bytes + kStepBytes - 1) / kStepBytes)};
  const ChannelEpilogue epilogue = load_epilogue<kOperand, kWideChannels>(p.linear, place);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kMultiplyThreads) {
    multiply_tile<kOperand, Shape>(p, place, steps, pipe, row_scales);
  } else if (thread == kMultiplyThreads) {
    copy_steps<Shape>(p, place, steps, pipe);
  }
  meet_all_roles();
  wait_for_predecessor();
  finish_tile<kOperand, kTokens, kWideChannels, kSplitThreads>(p.linear, place, epilogue, row_scales,
                                                               reinterpret_cast<float*>(pipe.stages));
  if (p.linear.split == 1 && p.sharers > 1) cluster_leave_together();
}

template <Operand kOperand, int kTokens>
glm_status launch_split(glm_device* device, const glm_linear_args& args) {
  using Shape = SplitShape<kOperand, kTokens>;
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  SplitParams params = {linear_params(args, kWideChannels), 1, 0, {}, {}};
  LinearParams& p = params.linear;
  p.k_bytes = args.x.cols * kElement;
  p.split = split_of<kOperand>(p.tiling.first_channel[args.num_parts], p.k_bytes);
  p.steps_per_block = ((p.k_bytes + kStepBytes - 1) / kStepBytes + p.split - 1) / p.split;
  const int tiles = p.tiling.first_tile[args.num_parts];
  if (tiles > 1 && p.split * Shape::kMaxSharers <= kMaxSplit) params.sharers = Shape::kMaxSharers;
  params.box_rows = box_rows_of(args.rows, kTokens, params.sharers);
  glm_status status =
      encode_map(device, "x", &params.x, args.x.data, args.rows, p.k_bytes, args.x.stride * kElement, params.box_rows);
  for (int i = 0; i < args.num_parts && status == GLM_OK; ++i) {
    const glm_weight& weight = args.parts[i];
    status = encode_map(device, "weights", &params.weights[i], weight.data, weight.rows, p.k_bytes,
                        weight.stride * kElement, kWideChannels);
  }
  if (status != GLM_OK) return status;
  const int cluster = p.split * params.sharers;
  const Grid grid{dim3(blocks_for(tiles, params.sharers) * cluster, blocks_for(args.rows, kTokens)), kSplitThreads,
                  Shape::kSharedBytes, cluster};
  return launch(device, "linear", grid, linear_wide_split_kernel<kOperand, kTokens>, params);
}

}  // namespace

glm_status linear_wide_split(glm_device* device, const glm_linear_args& args) {
  if (args.format == GLM_W_FP8_CHANNEL) return launch_split<Operand::kFp8Channel, kChunkTokens>(device, args);
  return launch_split<Operand::kBf16, 2 * kChunkTokens>(device, args);
}

}  // namespace glm::cuda
