/* How the router orders experts. */
#ifndef GLM_CUDA_MOE_ROUTE_KEY_CUH
#define GLM_CUDA_MOE_ROUTE_KEY_CUH

#include <cstdint>

namespace glm::cuda {

constexpr uint32_t kTaken = 0; /* the key of an expert that cannot be chosen, below all others */

/* Larger values have larger keys; none is 0. */
__device__ __forceinline__ uint32_t ascending_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace glm::cuda

#endif
