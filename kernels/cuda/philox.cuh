/* Philox4x32-10 (Salmon et al. 2011) and the Gumbel noise drawn from it. */
#ifndef GLM_CUDA_PHILOX_CUH
#define GLM_CUDA_PHILOX_CUH

#include <cstdint>

namespace glm::cuda {

__device__ __forceinline__ uint4 philox4x32_10(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, counter.x);
    const uint32_t low0 = 0xD2511F53u * counter.x;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z);
    const uint32_t low1 = 0xCD9E8D57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return counter;
}

/* -log(-log(u)), u from the upper 23 bits of a word. */
__device__ __forceinline__ float gumbel(uint32_t word) {
  const float u = (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f;
  return -logf(-logf(u));
}

}  // namespace glm::cuda

#endif
