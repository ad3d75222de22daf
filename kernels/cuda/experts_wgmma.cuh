/* The two expert layers on wgmma, on persistent blocks. Included by one source file an operand type. */
#ifndef GLM_CUDA_EXPERTS_WGMMA_CUH
#define GLM_CUDA_EXPERTS_WGMMA_CUH

#include "experts_split.cuh"

namespace glm::cuda {

template <ExpertLayer kLayer, Operand kOperand, int kTokens>
__global__ void __launch_bounds__(kWgmmaThreads, 2) expert_wgmma_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wgmma_stages(kTokens)> ring;
  __shared__ ExpertTables<kTokens> tables;
  const WgmmaPipe<kTokens> pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  int32_t* room = reinterpret_cast<int32_t*>(pipe.stages + wgmma_stages(kTokens) * wgmma_stage_bytes(kTokens));
  const Listing listing = begin_experts<kLayer>(p, room, pipe);
  if (p.skip != nullptr && *p.skip != 0) return;
  walk_experts<kLayer, kOperand>(p, listing, pipe, tables);
}

template <ExpertLayer kLayer, Operand kOperand, int kTokens>
glm_status launch_experts(glm_device* device, const ExpertParams& p) {
  constexpr int kBlocksPerMultiprocessor = 2;
  const size_t bytes =
      kSwizzleAlignment + static_cast<size_t>(wgmma_stages(kTokens)) * wgmma_stage_bytes(kTokens) + listing_bytes(p);
  const Grid grid{dim3(static_cast<unsigned>(device->sm_count * kBlocksPerMultiprocessor)), kWgmmaThreads, bytes};
  return launch(device, kLayer == ExpertLayer::kGateUp ? "moe_gate_up" : "moe_down", grid,
                expert_wgmma_kernel<kLayer, kOperand, kTokens>, p);
}

/* Whether moe_group made these lists, so that there is room for all assignments in the order, and a block can hold them. */
inline bool can_list(const glm_device* device, const ExpertInputs& in, int rows) {
  const LastGrouping& last = device->last_grouping;
  return last.offsets == in.offsets && last.order == in.order && last.rows == rows &&
         static_cast<int64_t>(rows) * in.top_k <= kMostListed;
}

/* Whether gate and up, whose assignments can be listed, need not wait for the grouping: nothing has been launched since but at most a
 * kernel beside it, which writes no input. So when the layer's first kernel starts, the grouping's own predecessors have ended. */
inline bool is_just_grouped(const glm_device* device, const ExpertParams& p, int rows) {
  const LastGrouping& last = device->last_grouping;
  if (device->launches == last.launches) return true;
  Touched inputs;
  inputs.reads(p.in.x, rows).reads(p.in.x_scale, rows).reads(last.ids, rows);
  return device->launches == last.launches + 1 && device->launched_beside && !inputs.meets(device->last_turn.touched);
}

template <ExpertLayer kLayer, Operand kOperand>
glm_status experts_on_wgmma(glm_device* device, const ExpertParams& params, int rows) {
  if (rows == 0) return GLM_OK;
  ExpertParams p = params;
  p.k_bytes = p.in.x.cols * (kOperand == Operand::kBf16 ? 2 : 1);
  p.tokens_aligned = are_tokens_aligned<kOperand>(p.in);
  constexpr bool kDown = kLayer == ExpertLayer::kDown;
  p.settled = kDown && p.skip == nullptr && device->settled_offsets == p.in.offsets;
  device->settled_offsets = kDown ? nullptr : p.in.offsets;
  if (can_list(device, p.in, rows)) {
    /* Other inputs are read through the L1 (beside.h). */
    p.by_ids = !kDown && kOperand != Operand::kFp8Block && p.tokens_aligned && p.skip == nullptr &&
               is_just_grouped(device, p, rows);
    p.listed = p.by_ids || p.settled ? rows * p.in.top_k : 0;
    p.ids = device->last_grouping.ids;
    p.first_id = device->last_grouping.first;
  }
  if constexpr (kLayer == ExpertLayer::kGateUp && kOperand != Operand::kBf16) {
    if (is_split(p, rows)) return launch_split<kOperand>(device, p);
  }
  if (rows <= 16) return launch_experts<kLayer, kOperand, 16>(device, p);
  return launch_experts<kLayer, kOperand, 64>(device, p);
}

}  // namespace glm::cuda

#endif
