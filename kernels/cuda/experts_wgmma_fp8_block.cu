#include "experts_wgmma.cuh"

namespace glm::cuda {

GLM_EXPERTS_ON_WGMMA(, Operand::kFp8Block);
GLM_COMBINED_ON_WGMMA(, Operand::kFp8Block);

}  // namespace glm::cuda
