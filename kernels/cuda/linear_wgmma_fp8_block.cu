#include "linear_wgmma.cuh"

namespace glm::cuda {

template glm_status linear_on_wgmma<Operand::kFp8Block>(glm_device*, const glm_linear_args&);

}  // namespace glm::cuda
