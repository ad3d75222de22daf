#include "experts_wgmma.cuh"

namespace glm::cuda {

GLM_EXPERTS_ON_WGMMA(, Operand::kBf16);
GLM_COMBINED_ON_WGMMA(, Operand::kBf16);

}  // namespace glm::cuda
