/* Gate and up of a few tokens on wgmma, FP8: a cluster of blocks splits the K of a tile while there are no more tiles than clusters, as
 * with a single expert: else multiprocessors would have nothing to read.
 *
 * The sum of each step of K is sent to the block that finishes its channels, which adds them in the order of the steps: the same
 * additions as in a tile that is not split, so the same bits. What is sent counts at that block's barrier, all that it waits for. */
#ifndef GLM_CUDA_EXPERTS_SPLIT_CUH
#define GLM_CUDA_EXPERTS_SPLIT_CUH

#include "cluster_sum.cuh"
#include "experts_walk.cuh"
#include "launch.h"

namespace glm::cuda {

/* Blocks of a cluster: each finishes the rows of a tile that one warp multiplies. */
constexpr int kExpertSplit = kWarpgroup / kWarp;
constexpr int kSplitChannels = kLayerChannels<ExpertLayer::kGateUp>;
constexpr int kSplitTokens = 2;
constexpr int kSplitGroups = kSplitChannels / kExpertSplit; /* channels that a block finishes */
constexpr int kMaxSplitSteps = 40;                          /* two blocks fit on a multiprocessor */

/* What a thread has of a step's sums: gate and up of a channel and two tokens. */
struct alignas(16) StepSums {
  float gate_up[2][2];
};
constexpr int kSplitPairs = (kSplitTokens + 1) / 2;
constexpr int kStepSums = kSplitPairs * kSplitGroups;

__host__ __device__ constexpr size_t split_sums_bytes(int steps) {
  return sizeof(StepSums) * steps * kStepSums;
}

/* This block's steps of a tile. */
__device__ __forceinline__ StepRange own_steps(StepRange all) {
  const int each = (all.last + kExpertSplit - 1) / kExpertSplit;
  const int first = min(static_cast<int>(cluster_rank()) * each, all.last);
  return {first, min(first + each, all.last)};
}

/* What a block finishes: sums[steps][kSplitPairs][kSplitGroups], and a barrier that counts their bytes. */
struct SplitSums {
  StepSums* sums;
  uint64_t* arrived;
};

/* By the multiplying warps: each sends the sums of its rows to the block that finishes them. */
template <Operand kOperand>
__device__ __forceinline__ void multiply_split(const FewPipe& pipe, const BlockScales& scales, const SplitSums& to,
                                               int tokens, StepRange steps, FewPipe::Place& at) {
  const uint32_t rank = threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int group = lane / 4;
  const int pair = lane % 4;
  const uint32_t sums = cluster_address(to.sums + pair * kSplitGroups + group, rank);
  const uint32_t arrived = cluster_address(to.arrived, rank);
  for (int step = steps.first; step < steps.last; ++step, at.advance()) {
    float part[4];
    start_stage<kOperand, kFewTokens>(part, pipe, at);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&pipe.ring->empty[at.stage]);
    float scaled[4] = {};
    promote<kOperand, kFewTokens>(scaled, part, scales, step);
    const float values[4] = {scaled[0], scaled[2], scaled[1], scaled[3]};
    if (pair * 2 < tokens) send_16(sums + step * kStepSums * sizeof(StepSums), values, arrived);
    __syncwarp();
  }
}

/* The channel of the tile that a thread of the first warp finishes. */
__device__ __forceinline__ int split_channel(const ExpertTile& tile) {
  return tile.channel + static_cast<int>(cluster_rank()) * kSplitGroups + static_cast<int>(threadIdx.x) % kSplitGroups;
}

/* By the first warp, once all blocks' sums are there: adds up this block's rows of the tile, and stores its channels. */
template <Operand kOperand>
__device__ __forceinline__ void finish_split(const ExpertParams& p, const RowScales& rows, const ExpertTile& tile,
                                             const ExpertTables<kFewTokens>& tables, const StepSums* sums) {
  const int token = static_cast<int>(threadIdx.x) / kSplitGroups;
  const int channel = split_channel(tile);
  if (token >= tile.count) return;
  const StepSums* own = sums + token / 2 * kSplitGroups + static_cast<int>(threadIdx.x) % kSplitGroups;
  ExpertSums total = {};
#pragma unroll 8
  for (int step = 0; step < p.steps().last; ++step) {
    total.low += own[step * kStepSums].gate_up[token % 2][0];
    total.high += own[step * kStepSums].gate_up[token % 2][1];
  }
  const ExpertOutputs out = finish_sums<ExpertLayer::kGateUp, kOperand>(total, tables.row_scales[0][token], rows);
  if (channel < p.first.rows) row_of<bf16>(p.y, tables.assignments[0][token])[channel] = out.low;
}

/* By the whole block: its part of the cluster's tile. Others' shared memory may be written to once the cluster is known to run;
 * the weights are on their way before. */
template <Operand kOperand>
__device__ __forceinline__ void split_tile(const ExpertParams& p, const Listing& listing, const ExpertTile& tile,
                                           Role role, const FewPipe& pipe, ExpertTables<kFewTokens>& tables,
                                           const SplitSums& sums) {
  ExpertInputs in = p.in;
  in.order = listing.order;
  const ExpertPair weights = expert_weights<ExpertLayer::kGateUp>(p, tile.expert);
  const StepRange steps = own_steps(p.steps());
  FewPipe::Place at;
  if (role == Role::kLoadWeights) {
    pipe.load_weights(expert_rows<ExpertLayer::kGateUp, kOperand>(weights, tile.channel), steps, p.k_bytes,
                      are_aligned<ExpertLayer::kGateUp, kOperand>(weights, p), at);
    cluster_wait();
  } else if (role == Role::kLoadTokens) {
    pipe.load_tokens(assignment_rows<kOperand, kFewTokens>(in, tile), steps, p.k_bytes, p.tokens_aligned, at);
    cluster_wait();
  } else {
    if (threadIdx.x == 0) {
      const int pairs = (tile.count + 1) / 2;
      barrier_expect(sums.arrived, static_cast<uint32_t>(p.steps().last * pairs * kSplitGroups * sizeof(StepSums)));
    }
    const RowScales rows = find_row_scales<ExpertLayer::kGateUp, kOperand>(weights, split_channel(tile));
    fill_tables<kOperand>(in, tile, 0, tables);
    cluster_wait();
    multiply_split<kOperand>(
        pipe, find_block_scales<ExpertLayer::kGateUp, kOperand, kFewTokens>(weights, tile.channel, 0, tables), sums,
        tile.count, steps, at);
    if (threadIdx.x >= kWarp) return;
    barrier_wait_cluster(sums.arrived, 0); /* so no block of the cluster ends before what is sent to it has come */
    finish_split<kOperand>(p, rows, tile, tables, sums.sums);
  }
}

template <Operand kOperand>
__global__ void __launch_bounds__(kWgmmaThreads, 2) expert_split_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wgmma_stages(kFewTokens)> ring;
  __shared__ ExpertTables<kFewTokens> tables;
  __shared__ uint64_t arrived;
  start_cluster(&arrived);
  const FewPipe pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  uint8_t* after = pipe.stages + wgmma_stages(kFewTokens) * wgmma_stage_bytes(kFewTokens);
  const SplitSums sums{reinterpret_cast<StepSums*>(after), &arrived};
  int32_t* room = reinterpret_cast<int32_t*>(after + split_sums_bytes(p.steps().last));
  const Listing listing = begin_experts<ExpertLayer::kGateUp>(p, room, pipe);
  const int channel_tiles = (p.first.rows + kSplitChannels - 1) / kSplitChannels;
  const int clusters = static_cast<int>(gridDim.x) / kExpertSplit;
  /* So few tokens are a tile of each expert at most. */
  if (touched_experts(p, listing.offsets) * channel_tiles > clusters) {
    cluster_wait();
    return walk_experts<ExpertLayer::kGateUp, kOperand>(p, listing, pipe, tables);
  }
  const Role role = role_of_warp();
  wait_in_role<ExpertLayer::kGateUp>(p, role);
  const int cluster = static_cast<int>(blockIdx.x) / kExpertSplit;
  const int expert = find_touched(p, listing.offsets, cluster / channel_tiles);
  if (expert < 0) return cluster_wait();
  split_tile<kOperand>(p, listing, whole_expert(listing.offsets, expert, cluster % channel_tiles * kSplitChannels),
                       role, pipe, tables, sums);
}

inline bool is_split(const ExpertParams& p, int rows) {
  return rows <= kSplitTokens && p.steps().last <= kMaxSplitSteps;
}

template <Operand kOperand>
glm_status launch_split(glm_device* device, const ExpertParams& p) {
  constexpr int kBlocksPerMultiprocessor = 2;
  const size_t stages = static_cast<size_t>(wgmma_stages(kFewTokens)) * wgmma_stage_bytes(kFewTokens);
  const int clusters = device->sm_count * kBlocksPerMultiprocessor / kExpertSplit;
  const Grid grid{dim3(static_cast<unsigned>(clusters * kExpertSplit)), kWgmmaThreads,
                  kSwizzleAlignment + stages + split_sums_bytes(p.steps().last) + listing_bytes(p), kExpertSplit};
  return launch(device, "moe_gate_up", grid, expert_split_kernel<kOperand>, p);
}

}  // namespace glm::cuda

#endif
