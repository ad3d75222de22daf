/* What every kernel of the expert layers on wgmma begins with, and how it turns sums into outputs. */
#ifndef GLM_CUDA_EXPERTS_TABLES_CUH
#define GLM_CUDA_EXPERTS_TABLES_CUH

#include "experts_listing.cuh"
#include "experts_tile.cuh"

namespace glm::cuda {

using FewPipe = WgmmaPipe<kFewTokens>;

/* What the multiplying warps know of a tile's tokens; two tiles alternate. */
template <int kTokens>
struct ExpertTables {
  int32_t assignments[2][kTokens];
  const float* scales[2][kTokens];
  float row_scales[2][kTokens];
  bf16 y[kTokens][kWgmmaPitch + 4]; /* rows of 144 bytes */
};

template <Operand kOperand, int kTokens>
__device__ __forceinline__ void fill_tables(const ExpertInputs& in, const ExpertTile& tile, int half,
                                            ExpertTables<kTokens>& tables) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kTokens) { /* past the last token, the last again */
    const int32_t assignment = in.order[tile.first + min(i, tile.count - 1)];
    tables.assignments[half][i] = assignment;
    if (kOperand != Operand::kBf16) {
      tables.scales[half][i] = row_of<float>(in.x_scale, x_row(in, assignment));
      tables.row_scales[half][i] = __ldcg(tables.scales[half][i]);
    }
  }
  named_barrier(kMultiplyBarrier, kWarpgroup);
}

/* Of the thread's rows group and group + 8: gate and up of one channel, or two channels of down. */
struct RowScales {
  float values[2];
};

template <ExpertLayer kLayer, Operand kOperand>
__device__ __forceinline__ RowScales find_row_scales(const ExpertPair& weights, int channel) {
  RowScales scales = {1.0f, 1.0f};
  if constexpr (kOperand == Operand::kFp8Channel) {
    const int last = weights.first.rows - 1;
    scales.values[0] = weights.first.scale[min(channel, last)];
    scales.values[1] = kLayer == ExpertLayer::kGateUp ? weights.second.scale[min(channel, last)]
                                                      : weights.first.scale[min(channel + 8, last)];
  }
  return scales;
}

template <ExpertLayer kLayer, Operand kOperand, int kTokens>
__device__ __forceinline__ BlockScales find_block_scales(const ExpertPair& weights, int channel, int half,
                                                         const ExpertTables<kTokens>& tables) {
  BlockScales scales = {};
  if (kOperand == Operand::kFp8Block) {
    const int64_t row = channel / GLM_FP8_BLOCK;
    scales.tokens = tables.scales[half];
    scales.weights[0] = weights.first.scale + row * weights.first.scale_stride;
    scales.weights[1] =
        kLayer == ExpertLayer::kGateUp ? weights.second.scale + row * weights.second.scale_stride : scales.weights[0];
  }
  return scales;
}

/* Of the thread's rows group and group + 8. */
struct ExpertSums {
  float low;
  float high;
};
struct ExpertOutputs {
  bf16 low;  /* gate and up made one, or a channel of down */
  bf16 high; /* of down */
};

template <ExpertLayer kLayer, Operand kOperand>
__device__ __forceinline__ ExpertOutputs finish_sums(ExpertSums sums, float token_scale, const RowScales& rows) {
  if constexpr (kOperand == Operand::kFp8Channel) {
    sums.low = sums.low * token_scale * rows.values[0];
    sums.high = sums.high * token_scale * rows.values[1];
  }
  if constexpr (kLayer == ExpertLayer::kGateUp) {
    return {swiglu<bf16>(sums.low, sums.high), {}};
  } else {
    return {from_float<bf16>(sums.low), from_float<bf16>(sums.high)};
  }
}

/* Where the weights lie, into the L1: a table that no operation writes. Nobody waits for the word itself. */
__device__ __forceinline__ void prefetch_table(const glm_expert_weights& weights) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < weights.count) {
    asm volatile("{.reg .b32 unused; ld.global.ca.b32 unused, [%0];}" ::"l"(weights.experts + i) : "memory");
  }
}

/* The successor is released only after the wait: when it starts, whatever this kernel waited for has ended, the grouping too
 * (ExpertParams::settled). `room`: for the listing. */
template <ExpertLayer kLayer, int kTokens>
__device__ __forceinline__ Listing begin_experts(const ExpertParams& p, int32_t* room, const WgmmaPipe<kTokens>& pipe) {
  prefetch_table(p.first);
  if (kLayer == ExpertLayer::kGateUp) prefetch_table(p.second);
  if (!p.settled && !p.by_ids) wait_for_predecessor();
  if (!p.by_ids) release_successor();
  const Listing listing = find_listing(p, room);
  pipe.init();
  return listing;
}

/* By the whole block, before others of its cluster send it bytes, which `arrived` counts: they first wait (cluster_wait) until it runs. */
__device__ __forceinline__ void start_cluster(uint64_t* arrived) {
  if (threadIdx.x == 0) {
    barrier_init(arrived, 1);
    barrier_init_fence();
  }
  cluster_arrive_started();
}

/* By each warp, before anything but its weights depends on the predecessor. */
template <ExpertLayer kLayer>
__device__ __forceinline__ void wait_in_role(const ExpertParams& p, Role role) {
  const bool has_tokens = kLayer == ExpertLayer::kGateUp && p.by_ids;
  if (role == Role::kMultiply || (role == Role::kLoadTokens && !has_tokens)) wait_for_predecessor();
  if (role == Role::kMultiply && p.by_ids) release_successor();
}

}  // namespace glm::cuda

#endif
