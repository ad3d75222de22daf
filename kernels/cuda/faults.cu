/* A GPU that hangs and one that fails, for tests of what ranks do then. */
#include "device.h"
#include "memory.h"

#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kThreads = 1024; /* two blocks leave no room for another on a multiprocessor */
constexpr int kBlocksPerMultiprocessor = 2;

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) occupy_kernel(uint64_t duration) {
  const uint64_t end = nanoseconds() + duration;
  while (nanoseconds() < end) __nanosleep(1000);
}

__global__ void fault_kernel(int* nowhere) {
  *nowhere = 1;
}

}  // namespace

GLM_EXPORT glm_status glm_cuda_occupy(glm_device* device, uint64_t nanoseconds) {
  glm_status status = glm::cuda::check(device, cudaSetDevice(device->ordinal), "cudaSetDevice");
  if (status != GLM_OK) return status;
  occupy_kernel<<<device->sm_count * kBlocksPerMultiprocessor, kThreads, 0, device->stream>>>(nanoseconds);
  return glm::cuda::check(device, cudaGetLastError(), "glm_cuda_occupy");
}

GLM_EXPORT glm_status glm_cuda_fault(glm_device* device) {
  glm_status status = glm::cuda::check(device, cudaSetDevice(device->ordinal), "cudaSetDevice");
  if (status != GLM_OK) return status;
  fault_kernel<<<1, 1, 0, device->stream>>>(nullptr);
  return glm::cuda::check(device, cudaGetLastError(), "glm_cuda_fault");
}
