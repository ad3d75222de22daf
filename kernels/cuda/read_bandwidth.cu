#include "kernel.cuh"
#include "launch.h"
#include "memory.h"
#include "mma.cuh"

namespace glm::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 8; /* in flight a thread */

/* Reads everything once; writes only if the words happen to sum to a value that random data does not give. */
__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data, int64_t vectors, uint32_t* sink) {
  begin_kernel();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kLoads;
  uint32_t sum = 0;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kThreads * kLoads; base < vectors; base += step) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = base + i * kThreads + static_cast<int64_t>(threadIdx.x);
      loaded[i] = at < vectors ? load_streaming_16(data + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum ^= loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
  }
  if (sum == 0x9E3779B9u) *sink = sum;
}

}  // namespace

}  // namespace glm::cuda

extern "C" __attribute__((visibility("default"))) glm_status glm_cuda_read(glm_device* device, void* data,
                                                                           size_t bytes) {
  using namespace glm::cuda;
  const Grid grid{dim3(static_cast<unsigned>(device->sm_count * 4)), kThreads};
  return launch(device, "read", grid, read_kernel, static_cast<const uint4*>(data),
                static_cast<int64_t>(bytes / sizeof(uint4)), static_cast<uint32_t*>(data));
}
