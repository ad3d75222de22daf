#include "collective.h"
#include "device.h"
#include "memory.h"

#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

using glm::cuda::check;

struct glm_graph {
  cudaGraphExec_t executable;
};

namespace {

/* The calling thread may have used another GPU last. */
glm_status enter(glm_device* device) {
  return check(device, cudaSetDevice(device->ordinal), "cudaSetDevice");
}

glm_status copy(glm_device* device, void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return GLM_OK;
  if (const glm_status status = enter(device); status != GLM_OK) return status;
  if (const glm_status status = glm::cuda::join_branch(device); status != GLM_OK) return status;
  return check(device, cudaMemcpyAsync(to, from, bytes, kind, device->stream), "cudaMemcpyAsync");
}

}  // namespace

GLM_EXPORT const char* glm_cuda_last_error(const glm_device* device) {
  return device->last_error.c_str();
}

GLM_EXPORT glm_status glm_cuda_memory_info(glm_device* device, size_t* free_bytes, size_t* total_bytes) {
  if (glm_status status = enter(device); status != GLM_OK) return status;
  return check(device, cudaMemGetInfo(free_bytes, total_bytes), "cudaMemGetInfo");
}

GLM_EXPORT glm_status glm_cuda_memory_alloc(glm_device* device, size_t bytes, void** out) {
  if (glm_status status = enter(device); status != GLM_OK) return status;
  return check(device, cudaMalloc(out, bytes), "cudaMalloc");
}

GLM_EXPORT glm_status glm_cuda_memory_free(glm_device* device, void* data) {
  if (glm_status status = enter(device); status != GLM_OK) return status;
  return check(device, cudaFree(data), "cudaFree");
}

GLM_EXPORT glm_status glm_cuda_host_alloc(glm_device* device, size_t bytes, void** out) {
  if (glm_status status = enter(device); status != GLM_OK) return status;
  return check(device, cudaMallocHost(out, bytes), "cudaMallocHost");
}

GLM_EXPORT glm_status glm_cuda_host_free(glm_device* device, void* data) {
  if (glm_status status = enter(device); status != GLM_OK) return status;
  return check(device, cudaFreeHost(data), "cudaFreeHost");
}

GLM_EXPORT glm_status glm_cuda_copy_in(glm_device* device, void* device_data, const void* host_data, size_t bytes) {
  return copy(device, device_data, host_data, bytes, cudaMemcpyHostToDevice);
}

GLM_EXPORT glm_status glm_cuda_copy_out(glm_device* device, void* host_data, const void* device_data, size_t bytes) {
  return copy(device, host_data, device_data, bytes, cudaMemcpyDeviceToHost);
}

GLM_EXPORT glm_status glm_cuda_copy(glm_device* device, void* to, const void* from, size_t bytes) {
  return copy(device, to, from, bytes, cudaMemcpyDeviceToDevice);
}

GLM_EXPORT glm_status glm_cuda_fill(glm_device* device, void* device_data, int byte, size_t bytes) {
  if (bytes == 0) return GLM_OK;
  if (const glm_status status = glm::cuda::join_branch(device); status != GLM_OK) return status;
  return check(device, cudaMemsetAsync(device_data, byte, bytes, device->stream), "cudaMemsetAsync");
}

GLM_EXPORT glm_status glm_cuda_synchronize(glm_device* device) {
  const glm_status status = check(device, cudaStreamSynchronize(device->stream), "cudaStreamSynchronize");
  return status == GLM_OK ? glm::cuda::check_group(device) : status;
}

GLM_EXPORT glm_status glm_cuda_graph_begin(glm_device* device) {
  if (glm_status status = enter(device); status != GLM_OK) return status;
  const glm_status status =
      check(device, cudaStreamBeginCapture(device->stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  if (status == GLM_OK) glm::cuda::begin_branches(device);
  return status;
}

GLM_EXPORT glm_status glm_cuda_graph_end(glm_device* device, glm_graph** out) {
  *out = nullptr;
  const glm_status joined = glm::cuda::end_branches(device);
  cudaGraph_t recorded = nullptr;
  glm_status status = check(device, cudaStreamEndCapture(device->stream, &recorded), "cudaStreamEndCapture");
  if (status != GLM_OK) return status;
  if (joined != GLM_OK) {
    cudaGraphDestroy(recorded);
    return joined;
  }
  cudaGraphExec_t executable = nullptr;
  status = check(device, cudaGraphInstantiate(&executable, recorded, 0), "cudaGraphInstantiate");
  const glm_status freed = check(device, cudaGraphDestroy(recorded), "cudaGraphDestroy");
  if (status != GLM_OK) return status;
  *out = new glm_graph{executable};
  return freed;
}

GLM_EXPORT glm_status glm_cuda_graph_launch(glm_device* device, glm_graph* graph) {
  return check(device, cudaGraphLaunch(graph->executable, device->stream), "cudaGraphLaunch");
}

GLM_EXPORT glm_status glm_cuda_graph_free(glm_device* device, glm_graph* graph) {
  const glm_status status = check(device, cudaGraphExecDestroy(graph->executable), "cudaGraphExecDestroy");
  delete graph;
  return status;
}

GLM_EXPORT uint64_t glm_cuda_branches(const glm_device* device) {
  return device->branch.opened;
}

GLM_EXPORT void* glm_cuda_stream(glm_device* device) {
  return device->stream;
}

GLM_EXPORT glm_status glm_cuda_graph_time(glm_device* device, glm_graph* graph, int replays, float* milliseconds) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  glm_status status = enter(device);
  if (status == GLM_OK) status = check(device, cudaEventCreate(&begin), "cudaEventCreate");
  if (status == GLM_OK) status = check(device, cudaEventCreate(&end), "cudaEventCreate");
  if (status == GLM_OK) status = check(device, cudaEventRecord(begin, device->stream), "cudaEventRecord");
  for (int i = 0; i < replays && status == GLM_OK; ++i) status = glm_cuda_graph_launch(device, graph);
  if (status == GLM_OK) status = check(device, cudaEventRecord(end, device->stream), "cudaEventRecord");
  if (status == GLM_OK) status = glm_cuda_synchronize(device);
  if (status == GLM_OK) status = check(device, cudaEventElapsedTime(milliseconds, begin, end), "cudaEventElapsedTime");
  if (begin != nullptr) cudaEventDestroy(begin);
  if (end != nullptr) cudaEventDestroy(end);
  return status;
}
