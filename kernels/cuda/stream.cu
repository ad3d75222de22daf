#include <new>

#include "collective.h"
#include "kernel.cuh"
#include "launch.h"
#include "memory.h"
#include "stream.h"

struct glm_event {
  cudaEvent_t event;
};

namespace glm::cuda {

namespace {

constexpr int kThreads = 128;

__global__ void update_pages_kernel(int32_t* page_table, int32_t max_pages, const glm_page_update* updates,
                                    int32_t count) {
  begin_kernel();
  const int32_t i = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const glm_page_update update = updates[i];
  page_table[static_cast<int64_t>(update.slot) * max_pages + update.index] = update.page;
}

}  // namespace

glm_status fill(glm_device* device, void* device_data, uint8_t byte, size_t bytes) {
  return glm_cuda_fill(device, device_data, byte, bytes);
}

glm_status update_pages(glm_device* device, const glm_slots* slots, const glm_page_update* updates, int32_t count) {
  const Grid grid{dim3(blocks_for(count, kThreads)), kThreads};
  return launch(device, "update_pages", grid, update_pages_kernel, slots->page_table, slots->max_pages, updates, count);
}

glm_status event_create(glm_device* device, glm_event** out) {
  *out = nullptr;
  if (const glm_status status = check(device, cudaSetDevice(device->ordinal), "cudaSetDevice"); status != GLM_OK) {
    return status;
  }
  cudaEvent_t event = nullptr;
  if (const glm_status status = check(device, cudaEventCreate(&event), "cudaEventCreate"); status != GLM_OK) {
    return status;
  }
  *out = new (std::nothrow) glm_event{event};
  if (*out != nullptr) return GLM_OK;
  cudaEventDestroy(event);
  return GLM_OUT_OF_MEMORY;
}

void event_destroy(glm_device*, glm_event* event) {
  cudaEventDestroy(event->event);
  delete event;
}

glm_status event_record(glm_device* device, glm_event* event) {
  return check(device, cudaEventRecord(event->event, device->stream), "cudaEventRecord");
}

glm_status event_wait(glm_device* device, glm_event* event) {
  const glm_status status = check(device, cudaEventSynchronize(event->event), "cudaEventSynchronize");
  return status == GLM_OK ? check_group(device) : status;
}

glm_status event_elapsed(glm_device* device, glm_event* from, glm_event* to, uint64_t* nanoseconds) {
  float milliseconds = 0;
  const cudaError_t result = cudaEventElapsedTime(&milliseconds, from->event, to->event);
  *nanoseconds = static_cast<uint64_t>(static_cast<double>(milliseconds) * 1e6);
  return check(device, result, "cudaEventElapsedTime");
}

void graph_free(glm_device* device, glm_graph* graph) {
  glm_cuda_graph_free(device, graph);
}

}  // namespace glm::cuda
