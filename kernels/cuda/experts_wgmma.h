/* The expert layers on Hopper's wgmma, bf16 activations. */
#ifndef GLM_CUDA_EXPERTS_WGMMA_H
#define GLM_CUDA_EXPERTS_WGMMA_H

#include "experts.cuh"

namespace glm::cuda {

enum class ExpertLayer { kGateUp, kDown };

/* Assignments that a block lists in its shared memory. */
constexpr int kMostListed = 512;

struct ExpertParams {
  ExpertInputs in;
  glm_expert_weights first;  /* gate, or down */
  glm_expert_weights second; /* up, or unused */
  glm_tensor y;              /* bf16, a row an assignment */
  int k_bytes = 0;
  bool tokens_aligned = false; /* rows of x start at and last for multiples of 16 bytes */
  bool settled = false;        /* the kernel may read what moe_group wrote before its predecessor ends */
  bool by_ids = false;         /* it groups `ids` by itself, and may read them and x before its predecessor ends */
  int listed = 0;              /* assignments, if a block has them all in its shared memory; else 0 */
  glm_tensor ids = {};
  int32_t first_id = 0;
  ProductRanks ranks = {}; /* of down */

  __host__ __device__ StepRange steps() const { return {0, (k_bytes + kStepBytes - 1) / kStepBytes}; }
};

/* f(row), row(assignment) being where its outputs go: f is there twice for down, so that a row that stays here costs no question. */
template <ExpertLayer kLayer, typename F>
__device__ __forceinline__ void with_output_rows(const ExpertParams& p, F&& f) {
  if (kLayer == ExpertLayer::kGateUp || p.ranks.y == nullptr) {
    f([&](int32_t assignment) { return row_of<bf16>(p.y, assignment); });
  } else {
    f([&](int32_t assignment) { return product_row<bf16>(p.y, p.ranks, p.in.top_k, assignment); });
  }
}

/* `p`: but for k_bytes and what follows it. */
template <ExpertLayer kLayer, Operand kOperand>
glm_status experts_on_wgmma(glm_device* device, const ExpertParams& p, int rows);

/* How a token's products become its row of out: base, if there is one, plus each local expert's by its weight, in the order of ids. */
struct CombineParams {
  int32_t rows;
  int32_t top_k;
  int32_t first;
  int32_t count;
  glm_tensor ids;
  glm_tensor weights;
  glm_tensor y;
  glm_tensor base;
  glm_tensor out;
};

constexpr int kFewChoices = 8;
constexpr int kMostCombined = 4; /* tokens whose products down adds up by itself */

/* Down of up to kMostCombined tokens of up to kFewChoices experts each, and the sums of its products. `p`: but for y, k_bytes and
 * what follows it. */
template <Operand kOperand>
glm_status combined_on_wgmma(glm_device* device, const ExpertParams& p, const CombineParams& combine);

#define GLM_COMBINED_ON_WGMMA(prefix, operand) \
  prefix template glm_status combined_on_wgmma<operand>(glm_device*, const ExpertParams&, const CombineParams&)

GLM_COMBINED_ON_WGMMA(extern, Operand::kBf16);
GLM_COMBINED_ON_WGMMA(extern, Operand::kFp8Channel);
GLM_COMBINED_ON_WGMMA(extern, Operand::kFp8Block);

#define GLM_EXPERTS_ON_WGMMA(prefix, operand)                                                                        \
  prefix template glm_status experts_on_wgmma<ExpertLayer::kGateUp, operand>(glm_device*, const ExpertParams&, int); \
  prefix template glm_status experts_on_wgmma<ExpertLayer::kDown, operand>(glm_device*, const ExpertParams&, int)

GLM_EXPERTS_ON_WGMMA(extern, Operand::kBf16);
GLM_EXPERTS_ON_WGMMA(extern, Operand::kFp8Channel);
GLM_EXPERTS_ON_WGMMA(extern, Operand::kFp8Block);

}  // namespace glm::cuda

#endif
