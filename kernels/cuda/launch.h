/* Kernel launches: checked, in the device's stream, with programmatic dependent launch.
 *
 * Every kernel is launched so that it may start while its predecessor still runs. So every kernel calls
 * wait_for_predecessor() (kernel.cuh) before it touches anything that an operation wrote, or writes anything; before that it may
 * only read weights. */
#ifndef GLM_CUDA_LAUNCH_H
#define GLM_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#include "device.h"

namespace glm::cuda {

struct Grid {
  dim3 blocks;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1; /* blocks of one cluster, along x */
};

constexpr size_t kDefaultSharedBytes = 48 * 1024;

template <typename... Params, typename... Args>
glm_status launch(glm_device* device, const char* name, const Grid& grid, void (*kernel)(Params...),
                  const Args&... args) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return GLM_OK;
  /* The calling thread may have used another GPU last. */
  if (const cudaError_t selected = cudaSetDevice(device->ordinal); selected != cudaSuccess) {
    return check(device, selected, "cudaSetDevice");
  }
  if (grid.shared_bytes > kDefaultSharedBytes) {
    const cudaError_t raised =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(grid.shared_bytes));
    if (raised != cudaSuccess) return check(device, raised, name);
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = device->stream;
  config.attrs = attributes;
  config.numAttrs = grid.cluster > 1 ? 2 : 1;
  return check(device, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), name);
}

inline unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace glm::cuda

#endif
