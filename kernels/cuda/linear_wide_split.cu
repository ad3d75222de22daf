/* Linear layers of a few hundred tokens on Hopper where decode splits K: FP8 with a scale a channel, bf16 output. A cluster splits K as
 * decode's does, and its blocks take 128 channels times 128 tokens each: half of the reads of decode's tiles. */
#include "linear_tile.cuh"
#include "tensor_map.h"
#include "wide_tile.cuh"

namespace glm::cuda {

namespace {

constexpr int kStages = wide_stages(1);
constexpr int kStageBytes = wide_stage_bytes(1);
constexpr int kSharedBytes = kSwizzleAlignment + kStages * kStageBytes;
constexpr int kPitch = kWideChannels + 4; /* of partial sums, which take the place of the stages */

struct SplitParams {
  LinearParams linear;
  CUtensorMap x;
  CUtensorMap weights[GLM_MAX_PARTS];
};

struct SplitPipe {
  using Place = RingPlace<kStages>;
  Ring<kStages>* ring;
  uint8_t* stages;

  __device__ __forceinline__ uint8_t* weights(const Place& at) const { return stages + at.stage * kStageBytes; }
  __device__ __forceinline__ uint8_t* tokens(const Place& at) const { return weights(at) + kWideChannels * kStepBytes; }
};

/* By one thread. The first weights are on their way before the predecessor's end. */
__device__ __forceinline__ void copy_steps(const SplitParams& p, const TilePlace& place, StepRange steps,
                                           const SplitPipe& pipe) {
  const CUtensorMap* map = &p.weights[place.part];
  const auto copy_weights = [&](int step, const SplitPipe::Place& at) {
    uint64_t* full = &pipe.ring->full[at.stage];
    barrier_expect(full, kStageBytes);
    copy_box(pipe.weights(at), map, step * kStepBytes, place.channel, full);
  };
  const int ahead = min(steps.first + kStages, steps.last);
  SplitPipe::Place at;
  for (int step = steps.first; step < ahead; ++step, at.advance()) copy_weights(step, at);
  wait_for_predecessor();
  at = {};
  for (int step = steps.first; step < steps.last; ++step, at.advance()) {
    if (step >= ahead) {
      pipe.ring->wait_empty(at);
      copy_weights(step, at);
    }
    copy_box(pipe.tokens(at), &p.x, step * kStepBytes, place.token, &pipe.ring->full[at.stage]);
  }
}

/* By a multiplying warpgroup: the sums of its 64 channels. */
__device__ __forceinline__ void multiply_steps(float* sums, StepRange steps, const SplitPipe& pipe) {
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  SplitPipe::Place at;
#pragma unroll
  for (int i = 0; i < kChunkTokens / 2; ++i) sums[i] = 0.0f;
  for (int step = steps.first; step < steps.last; ++step, at.advance()) {
    pipe.ring->wait_full(at);
    multiply_chunk<kChunkTokens>(sums, pipe.weights(at) + group * kWgmmaWeightBytes, pipe.tokens(at));
    if (threadIdx.x % kWarp == 0) barrier_arrive(&pipe.ring->empty[at.stage]);
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

__global__ void __launch_bounds__(kWideThreads, 1) linear_wide_split_kernel(const __grid_constant__ SplitParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<kStages> ring;
  __shared__ float row_scales[kChunkTokens];
  release_successor();
  const SplitPipe pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  if (threadIdx.x == 0) ring.init(1, kMultiplyThreads / kWarp);
  __syncthreads();
  const TilePlace place = tile_place(p.linear, kChunkTokens);
  const int first = place.rank * p.linear.steps_per_block;
  const StepRange steps{first, min(first + p.linear.steps_per_block, (p.linear.k_bytes + kStepBytes - 1) / kStepBytes)};
  const ChannelEpilogue epilogue = load_epilogue<Operand::kFp8Channel, kWideChannels>(p.linear, place);
  auto* partials = reinterpret_cast<float*>(pipe.stages);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kMultiplyThreads) {
    float sums[kChunkTokens / 2];
    multiply_steps(sums, steps, pipe);
    named_barrier(kWideBarrier, kMultiplyThreads); /* the stages make room for the partial sums */
    store_wide_partials(sums, partials);
  } else if (thread == kMultiplyThreads) {
    copy_steps(p, place, steps, pipe);
  } else if (thread >= kMultiplyThreads + kWarp) {
    wait_for_predecessor();
    for (int i = thread - kMultiplyThreads - kWarp; i < kChunkTokens; i += kStoreThreads) {
      row_scales[i] = *row_of<float>(p.linear.x_scale, min(place.token + i, p.linear.rows - 1));
    }
  }
  __syncthreads();
  wait_for_predecessor();
  finish_tile<Operand::kFp8Channel, kChunkTokens, kWideChannels, kWideThreads>(p.linear, place, epilogue, row_scales,
                                                                               partials);
}

}  // namespace

glm_status linear_wide_split(glm_device* device, const glm_linear_args& args) {
  SplitParams params = {linear_params(args, kWideChannels), {}, {}};
  LinearParams& p = params.linear;
  p.k_bytes = args.x.cols;
  p.split = split_of<Operand::kFp8Channel>(p.tiling.first_channel[args.num_parts], p.k_bytes);
  p.steps_per_block = ((p.k_bytes + kStepBytes - 1) / kStepBytes + p.split - 1) / p.split;
  glm_status status =
      encode_map(device, "x", &params.x, args.x.data, args.rows, args.x.cols, args.x.stride, kChunkTokens);
  for (int i = 0; i < args.num_parts && status == GLM_OK; ++i) {
    const glm_weight& weight = args.parts[i];
    status = encode_map(device, "weights", &params.weights[i], weight.data, weight.rows, args.x.cols, weight.stride,
                        kWideChannels);
  }
  if (status != GLM_OK) return status;
  const Grid grid{dim3(p.tiling.first_tile[args.num_parts] * p.split, blocks_for(args.rows, kChunkTokens)),
                  kWideThreads, kSharedBytes, p.split};
  return launch(device, "linear", grid, linear_wide_split_kernel, params);
}

}  // namespace glm::cuda
