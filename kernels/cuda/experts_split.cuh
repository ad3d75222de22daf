/* Gate and up of a few tokens on wgmma, FP8: a cluster of blocks splits the K of a tile while there are no more tiles than clusters, as
 * with a single expert: else multiprocessors would have nothing to read.
 *
 * The sum of each step of K is sent to the block that finishes its channels, which adds them in the order of the steps: the same
 * additions as in a tile that is not split, so the same bits. */
#ifndef GLM_CUDA_EXPERTS_SPLIT_CUH
#define GLM_CUDA_EXPERTS_SPLIT_CUH

#include "experts_walk.cuh"
#include "launch.h"
#include "tma.cuh"

namespace glm::cuda {

/* Blocks of a cluster: each finishes the rows of a tile that one warp multiplies. */
constexpr int kExpertSplit = kWarpgroup / kWarp;
constexpr int kSplitChannels = kLayerChannels<ExpertLayer::kGateUp>;
constexpr int kSplitTokens = 4;
constexpr int kSplitWidth = 8; /* tokens of a multiply */
constexpr int kRankRows = kWgmmaChannels / kExpertSplit;
constexpr int kStepSums = kSplitTokens * kRankRows;
constexpr int kSplitGroups = kRankRows / 2; /* channels that a block finishes: a row of gate and one of up each */
constexpr int kMaxSplitSteps = 40;          /* two blocks fit on a multiprocessor */

using SplitPipe = WgmmaPipe<kSplitWidth>;

__host__ __device__ constexpr size_t split_sums_bytes(int steps) {
  return sizeof(float) * steps * kStepSums;
}

/* This block's steps of a tile. */
__device__ __forceinline__ StepRange own_steps(StepRange all) {
  const int each = (all.last + kExpertSplit - 1) / kExpertSplit;
  const int first = min(static_cast<int>(cluster_rank()) * each, all.last);
  return {first, min(first + each, all.last)};
}

/* By the multiplying warps: each sends the sums of its rows to the block that finishes them, into its
 * sums[steps][kSplitTokens][kRankRows]. */
template <Operand kOperand>
__device__ __forceinline__ void multiply_split(const SplitPipe& pipe, const BlockScales& scales, float* sums,
                                               StepRange steps, SplitPipe::Place& at) {
  const uint32_t rank = threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int group = lane / 4;
  const int token = lane % 4 * 2;
  const uint32_t to = cluster_address(sums + token * kRankRows + group, rank);
  for (int step = steps.first; step < steps.last; ++step, at.advance()) {
    float part[4];
    start_stage<kOperand, kSplitWidth>(part, pipe, at);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&pipe.ring->empty[at.stage]);
    float scaled[4] = {};
    promote<kOperand, kSplitWidth>(scaled, part, scales, step);
    if (token >= kSplitTokens) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int offset = step * kStepSums + i % 2 * kRankRows + i / 2 * 8;
      store_remote(to + offset * sizeof(float), scaled[i]);
    }
  }
  __syncwarp();
}

/* The channel of the tile that a thread of the first warp finishes. */
__device__ __forceinline__ int split_channel(const ExpertTile& tile) {
  return tile.channel + static_cast<int>(cluster_rank()) * kSplitGroups + static_cast<int>(threadIdx.x) % kSplitGroups;
}

/* By the first warp, once all blocks have sent their sums: adds up this block's rows of the tile, and stores its channels. */
template <Operand kOperand>
__device__ __forceinline__ void finish_split(const ExpertParams& p, const RowScales& rows, const ExpertTile& tile,
                                             const ExpertTables<kSplitWidth>& tables, const float* sums) {
  const int token = static_cast<int>(threadIdx.x) / kSplitGroups;
  const int channel = split_channel(tile);
  if (token >= tile.count) return;
  const float* own = sums + token * kRankRows + static_cast<int>(threadIdx.x) % kSplitGroups;
  ExpertSums total = {};
#pragma unroll 8
  for (int step = 0; step < p.steps().last; ++step) {
    total.low += own[step * kStepSums];
    total.high += own[step * kStepSums + kSplitGroups];
  }
  const ExpertOutputs out = finish_sums<ExpertLayer::kGateUp, kOperand>(total, tables.row_scales[0][token], rows);
  if (channel < p.first.rows) row_of<bf16>(p.y, tables.assignments[0][token])[channel] = out.low;
}

__device__ __forceinline__ int tiles_of(const ExpertParams& p, const int32_t* offsets) {
  int tiles = 0;
  for (int i = 0; i < p.first.count; ++i) tiles += (offsets[i + 1] - offsets[i] + kSplitTokens - 1) / kSplitTokens;
  return tiles * ((p.first.rows + kSplitChannels - 1) / kSplitChannels);
}

/* By the whole block: its part of its cluster's only tile, if there is one. */
template <Operand kOperand>
__device__ __forceinline__ void split_tile(const ExpertParams& p, const Listing& listing, const SplitPipe& pipe,
                                           ExpertTables<kSplitWidth>& tables, float* sums) {
  const Role role = role_of_warp();
  wait_in_role<ExpertLayer::kGateUp>(p, role);
  ExpertWalk<kSplitChannels, kSplitTokens> walk(p, listing.offsets, static_cast<int>(blockIdx.x) / kExpertSplit,
                                                static_cast<int>(gridDim.x) / kExpertSplit);
  if (!walk.find()) return;
  ExpertInputs in = p.in;
  in.order = listing.order;
  const ExpertTile tile = walk.tile();
  const ExpertPair weights = expert_weights<ExpertLayer::kGateUp>(p, tile.expert);
  const StepRange steps = own_steps(p.steps());
  SplitPipe::Place at;
  switch (role) {
    case Role::kLoadWeights:
      pipe.load_weights(expert_rows<ExpertLayer::kGateUp, kOperand>(weights, tile.channel), steps, p.k_bytes,
                        are_aligned<ExpertLayer::kGateUp, kOperand>(weights, p), at);
      break;
    case Role::kLoadTokens:
      pipe.load_tokens(assignment_rows<kOperand, kSplitWidth>(in, tile), steps, p.k_bytes, p.tokens_aligned, at);
      break;
    case Role::kMultiply:
      fill_tables<kOperand>(in, tile, 0, tables);
      multiply_split<kOperand>(
          pipe, find_block_scales<ExpertLayer::kGateUp, kOperand, kSplitWidth>(weights, tile.channel, 0, tables), sums,
          steps, at);
      break;
  }
  cluster_arrive();
  RowScales rows = {};
  if (threadIdx.x < kWarp) rows = find_row_scales<ExpertLayer::kGateUp, kOperand>(weights, split_channel(tile));
  cluster_wait(); /* all blocks have sent their sums, so none is gone before what is sent to it has come */
  if (threadIdx.x < kWarp) finish_split<kOperand>(p, rows, tile, tables, sums);
}

template <Operand kOperand>
__global__ void __launch_bounds__(kWgmmaThreads, 2) expert_split_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wgmma_stages(kSplitWidth)> ring;
  __shared__ ExpertTables<kSplitWidth> tables;
  const SplitPipe pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  uint8_t* after = pipe.stages + wgmma_stages(kSplitWidth) * wgmma_stage_bytes(kSplitWidth);
  float* sums = reinterpret_cast<float*>(after);
  int32_t* room = reinterpret_cast<int32_t*>(after + split_sums_bytes(p.steps().last));
  const Listing listing = begin_experts<ExpertLayer::kGateUp>(p, room, pipe);
  cluster_sync(); /* all blocks have started: others may write to their shared memory */
  if (tiles_of(p, listing.offsets) <= static_cast<int>(gridDim.x) / kExpertSplit) {
    split_tile<kOperand>(p, listing, pipe, tables, sums);
  } else {
    walk_experts<ExpertLayer::kGateUp, kOperand>(p, listing, pipe, tables);
  }
}

inline bool is_split(const ExpertParams& p, int rows) {
  return rows <= kSplitTokens && p.steps().last <= kMaxSplitSteps;
}

template <Operand kOperand>
glm_status launch_split(glm_device* device, const ExpertParams& p) {
  constexpr int kBlocksPerMultiprocessor = 2;
  const size_t stages = static_cast<size_t>(wgmma_stages(kSplitWidth)) * wgmma_stage_bytes(kSplitWidth);
  const int clusters = device->sm_count * kBlocksPerMultiprocessor / kExpertSplit;
  const Grid grid{dim3(static_cast<unsigned>(clusters * kExpertSplit)), kWgmmaThreads,
                  kSwizzleAlignment + stages + split_sums_bytes(p.steps().last) + listing_bytes(p), kExpertSplit};
  return launch(device, "moe_gate_up", grid, expert_split_kernel<kOperand>, p);
}

}  // namespace glm::cuda

#endif
