/* The two expert layers on wgmma, on persistent blocks. Included by one source file an operand type. */
#ifndef GLM_CUDA_EXPERTS_WGMMA_CUH
#define GLM_CUDA_EXPERTS_WGMMA_CUH

#include "experts_combine.cuh"
#include "experts_split.cuh"

namespace glm::cuda {

/* Tokens of a tile; all give the same bits. Narrow tiles leave more room for weights on their way, but an expert of more tokens needs more
 * of them, which read its weights again. */
constexpr int kNarrowTokens = 32;
constexpr int kWideTokens = 64;

template <int kTokens>
constexpr int kExpertStageBytes = wgmma_stages(kTokens) * wgmma_stage_bytes(kTokens);
static_assert(kExpertStageBytes<kWideTokens> == kExpertStageBytes<kNarrowTokens>);

template <ExpertLayer kLayer, Operand kOperand, int kTokens>
__global__ void __launch_bounds__(kWgmmaThreads, 2) expert_wgmma_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wgmma_stages(kTokens)> ring;
  __shared__ ExpertTables<kTokens> tables;
  const WgmmaPipe<kTokens> pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  int32_t* room = reinterpret_cast<int32_t*>(pipe.stages + kExpertStageBytes<kTokens>);
  const Listing listing = begin_experts<kLayer>(p, room, pipe);
  walk_experts<kLayer, kOperand>(p, listing, pipe, tables);
}

/* Of the expert that has most. By whole warps. */
__device__ __forceinline__ int most_tokens(const int32_t* offsets, int experts) {
  int most = 0;
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < experts; i += kWarp) {
    most = max(most, offsets[i + 1] - offsets[i]);
  }
  return __reduce_max_sync(0xffffffffu, most);
}

/* Tiles are wide if an expert has too many tokens for a narrow one. */
template <ExpertLayer kLayer, Operand kOperand>
__global__ void __launch_bounds__(kWgmmaThreads, 2) expert_any_width_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wgmma_stages(kNarrowTokens)> narrow_ring;
  __shared__ Ring<wgmma_stages(kWideTokens)> wide_ring;
  __shared__ union {
    ExpertTables<kNarrowTokens> narrow;
    ExpertTables<kWideTokens> wide;
  } tables;
  const WgmmaPipe<kNarrowTokens> narrow{&narrow_ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  int32_t* room = reinterpret_cast<int32_t*>(narrow.stages + kExpertStageBytes<kNarrowTokens>);
  const Listing listing = begin_experts<kLayer>(p, room, narrow);
  if (most_tokens(listing.offsets, p.first.count) > kNarrowTokens) {
    const WgmmaPipe<kWideTokens> wide{&wide_ring, narrow.stages};
    wide.init();
    walk_experts<kLayer, kOperand>(p, listing, wide, tables.wide);
  } else {
    walk_experts<kLayer, kOperand>(p, listing, narrow, tables.narrow);
  }
}

/* kTokens: of a tile. */
template <ExpertLayer kLayer, int kTokens>
glm_status launch_experts(glm_device* device, const ExpertParams& p, void (*kernel)(ExpertParams)) {
  constexpr int kBlocksPerMultiprocessor = 2;
  const size_t bytes = kSwizzleAlignment + kExpertStageBytes<kTokens> + listing_bytes(p);
  const Grid grid{dim3(static_cast<unsigned>(device->sm_count * kBlocksPerMultiprocessor)), kWgmmaThreads, bytes};
  return launch(device, kLayer == ExpertLayer::kGateUp ? "moe_gate_up" : "moe_down", grid, kernel, p);
}

/* Whether moe_group made these lists, so that there is room for all assignments in the order, and a block can hold them. */
inline bool can_list(const glm_device* device, const ExpertInputs& in, int rows) {
  const LastGrouping& last = device->last_grouping;
  return last.offsets == in.offsets && last.order == in.order && last.rows == rows &&
         static_cast<int64_t>(rows) * in.top_k <= kMostListed;
}

/* Whether gate and up, whose assignments can be listed, need not wait for the grouping: nothing has been launched since but at most a
 * kernel beside it. So when the layer's first kernel starts, what came before these two and before the kernel that the grouping itself ran beside has
 * ended; neither kernel writes an input, nor does a branch that this call waits for. */
inline bool is_just_grouped(const glm_device* device, const ExpertParams& p, int rows) {
  const LastGrouping& last = device->last_grouping;
  Touched inputs;
  inputs.reads(p.in.x, rows).reads(p.in.x_scale, rows).reads(last.ids, rows);
  if (inputs.meets(last.beside) || joins_branch(device)) return false;
  if (device->launches == last.launches) return true;
  return device->launches == last.launches + 1 && device->launched_beside && !inputs.meets(device->last_turn.touched);
}

/* The parameters that follow from what was launched before. */
template <ExpertLayer kLayer, Operand kOperand>
ExpertParams follow_grouping(glm_device* device, const ExpertParams& params, int rows) {
  ExpertParams p = params;
  p.k_bytes = p.in.x.cols * (kOperand == Operand::kBf16 ? 2 : 1);
  p.tokens_aligned = are_tokens_aligned<kOperand>(p.in);
  constexpr bool kDown = kLayer == ExpertLayer::kDown;
  p.settled = kDown && device->settled_offsets == p.in.offsets;
  device->settled_offsets = kDown ? nullptr : p.in.offsets;
  if (can_list(device, p.in, rows)) {
    /* Other inputs are read through the L1 (beside.h). Each block lists an expert's tokens in an order of its own: one tile has them all. */
    p.by_ids = !kDown && kOperand != Operand::kFp8Block && p.tokens_aligned && rows <= kWideTokens &&
               is_just_grouped(device, p, rows);
    p.listed = p.by_ids || p.settled ? rows * p.in.top_k : 0;
    p.ids = device->last_grouping.ids;
    p.first_id = device->last_grouping.first;
  }
  return p;
}

template <ExpertLayer kLayer, Operand kOperand>
glm_status experts_on_wgmma(glm_device* device, const ExpertParams& params, int rows) {
  if (rows == 0) return GLM_OK;
  const ExpertParams p = follow_grouping<kLayer, kOperand>(device, params, rows);
  if constexpr (kLayer == ExpertLayer::kGateUp && kOperand != Operand::kBf16) {
    if (is_split(p, rows)) return launch_split<kOperand>(device, p);
  }
  if constexpr (kLayer == ExpertLayer::kGateUp) {
    if (rows <= kFewTokens) {
      return launch_experts<kLayer, kFewTokens>(device, p, expert_wgmma_kernel<kLayer, kOperand, kFewTokens>);
    }
  }
  if (rows <= kNarrowTokens) {
    return launch_experts<kLayer, kNarrowTokens>(device, p, expert_wgmma_kernel<kLayer, kOperand, kNarrowTokens>);
  }
  return launch_experts<kLayer, kWideTokens>(device, p, expert_any_width_kernel<kLayer, kOperand>);
}

template <Operand kOperand>
glm_status combined_on_wgmma(glm_device* device, const ExpertParams& params, const CombineParams& combine) {
  if (combine.rows == 0) return GLM_OK;
  return launch_combined<kOperand>(device, follow_grouping<ExpertLayer::kDown, kOperand>(device, params, combine.rows),
                                   combine);
}

}  // namespace glm::cuda

#endif
