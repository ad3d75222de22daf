/* What the wide tiles of experts need in the workspace: the tokens' rows in the order of the experts, and tensor maps of the weights. */
#ifndef GLM_CUDA_EXPERTS_PACK_H
#define GLM_CUDA_EXPERTS_PACK_H

#include <cuda.h>

#include "experts_wgmma.h"

namespace glm::cuda {

struct PackedExperts {
  CUtensorMap* maps; /* [count][2]: gate and up, or down and nothing */
  int32_t* usable;   /* 1 if the weights of every expert are aligned to 16 bytes, as tensor copies need */
  bf16** outputs;    /* [rows * top_k]: where those of the i-th assignment of the order go */
  uint8_t* x;        /* [rows * top_k][columns]: FP8 row i is that of the i-th assignment of the order */
};

/* Rows of weights in a copy: a block's tile takes 64 of gate and 64 of up, or 128 of down. */
template <ExpertLayer kLayer>
constexpr int kExpertBox = kLayer == ExpertLayer::kGateUp ? 64 : 128;

/* Whether a layer of that many tokens is worth it, and its rows of x allow it. */
bool is_packed(const ExpertInputs& in, glm_weight_format format, glm_dtype act, int rows);

size_t packed_bytes(int64_t assignments, int64_t columns, int count);
PackedExperts packed_experts(std::byte* workspace, int64_t assignments, int64_t columns);
/* box: rows of weights in a copy. */
glm_status pack_experts(glm_device* device, const ExpertParams& p, int64_t assignments, const PackedExperts& packed,
                        int box);

/* The layer on packed experts; on decode's tiles if they are not usable. */
template <ExpertLayer kLayer>
glm_status experts_wide(glm_device* device, const ExpertParams& p, int64_t assignments, const PackedExperts& packed);
extern template glm_status experts_wide<ExpertLayer::kGateUp>(glm_device*, const ExpertParams&, int64_t,
                                                              const PackedExperts&);
extern template glm_status experts_wide<ExpertLayer::kDown>(glm_device*, const ExpertParams&, int64_t,
                                                            const PackedExperts&);

/* Either way, for the same bits. `workspace`: for packed experts. */
template <ExpertLayer kLayer, Operand kOperand>
glm_status experts_on_hopper(glm_device* device, const ExpertParams& p, int rows, std::byte* workspace) {
  if constexpr (kOperand == Operand::kFp8Channel) {
    if (is_packed(p.in, p.first.format, GLM_BF16, rows)) {
      const int64_t assignments = static_cast<int64_t>(rows) * p.in.top_k;
      const PackedExperts packed = packed_experts(workspace, assignments, p.in.x.cols);
      const glm_status status = pack_experts(device, p, assignments, packed, kExpertBox<kLayer>);
      return status == GLM_OK ? experts_wide<kLayer>(device, p, assignments, packed) : status;
    }
  }
  return experts_on_wgmma<kLayer, kOperand>(device, p, rows);
}

}  // namespace glm::cuda

#endif
