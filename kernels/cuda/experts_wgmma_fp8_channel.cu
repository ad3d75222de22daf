#include "experts_wgmma.cuh"

namespace glm::cuda {

GLM_EXPERTS_ON_WGMMA(, Operand::kFp8Channel);
GLM_COMBINED_ON_WGMMA(, Operand::kFp8Channel);

}  // namespace glm::cuda
