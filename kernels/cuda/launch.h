/* Kernel launches: checked, in the device's stream or a branch's, with programmatic dependent launch.
 *
 * Every kernel is launched so that it may start while its predecessor still runs. So every kernel calls
 * wait_for_predecessor() (kernel.cuh) before it touches anything that an operation wrote, or writes anything; before that it may
 * only read weights, and past the L1 what the host copied before the step: positions and slots of rows. The exceptions: beside.h,
 * gate and up of experts (is_just_grouped, experts_wgmma.cuh), and keys and values of earlier steps (settled_launches, device.h). */
#ifndef GLM_CUDA_LAUNCH_H
#define GLM_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#include "device.h"

namespace glm::cuda {

struct Grid {
  dim3 blocks;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1;     /* blocks of one cluster, along x */
  bool beside = false; /* the kernel has been told to run beside its predecessor */
};

/* Up to 48 KB a block need no asking, but what a kernel declares by itself counts too. */
constexpr size_t kDefaultSharedBytes = 40 * 1024;

constexpr int kMostAttributes = 3;

/* What a launch is made of; `attributes` must outlive it. Every kernel asks for as much shared memory as a multiprocessor has: it can change
 * that only when it is idle, so blocks of kernels that ask for different parts of it would not run beside each other. */
inline cudaLaunchConfig_t launch_config(cudaStream_t stream, const Grid& grid,
                                        cudaLaunchAttribute attributes[kMostAttributes]) {
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  attributes[2].id = cudaLaunchAttributeClusterDimension;
  attributes[2].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = grid.cluster > 1 ? 3 : 2;
  return config;
}

/* Selects the device, and lets the kernel have the grid's shared memory. */
template <typename... Params>
cudaError_t prepare_launch(const glm_device* device, const Grid& grid, void (*kernel)(Params...)) {
  /* The calling thread may have used another GPU last. */
  const cudaError_t selected = cudaSetDevice(device->ordinal);
  if (selected != cudaSuccess || grid.shared_bytes <= kDefaultSharedBytes) return selected;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(grid.shared_bytes));
}

template <typename... Params, typename... Args>
glm_status launch(glm_device* device, const char* name, const Grid& grid, void (*kernel)(Params...),
                  const Args&... args) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return GLM_OK;
  const cudaError_t prepared = prepare_launch(device, grid, kernel);
  if (prepared != cudaSuccess) return check(device, prepared, name);
  cudaStream_t stream = nullptr;
  if (const glm_status status = stream_of_call(device, &stream); status != GLM_OK) return status;
  cudaLaunchAttribute attributes[kMostAttributes] = {};
  const cudaLaunchConfig_t config = launch_config(stream, grid, attributes);
  if (stream == device->stream) {
    ++device->launches;
    device->launched_beside = grid.beside;
  }
  return check(device, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), name);
}

/* Clusters of such blocks that the GPU holds at once; 1 if it cannot say. */
template <typename... Params>
int resident_clusters(const glm_device* device, const Grid& grid, void (*kernel)(Params...)) {
  int clusters = 0;
  cudaLaunchAttribute attributes[kMostAttributes] = {};
  const cudaLaunchConfig_t config = launch_config(device->stream, grid, attributes);
  if (prepare_launch(device, grid, kernel) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    return 1;
  }
  return clusters > 0 ? clusters : 1;
}

inline unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace glm::cuda

#endif
