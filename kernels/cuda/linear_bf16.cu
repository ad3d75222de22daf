#include "linear_kernel.cuh"

namespace glm::cuda {

template glm_status linear_on_tensor_cores<Operand::kBf16>(glm_device*, const glm_linear_args&);

}  // namespace glm::cuda
