#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>

#include "device.h"

namespace glm::fut {

namespace {

/* On the context's GPU, which glm_context makes the thread's. */
template <typename Call>
glm_status on_device(glm_device* device, const char* name, Call&& call) {
  glm_context(device);
  const hipError_t result = call();
  if (result == hipSuccess) return GLM_OK;
  const glm_status status = result == hipErrorOutOfMemory ? GLM_OUT_OF_MEMORY : GLM_DEVICE_ERROR;
  return failed(device, status, std::string(name) + ": " + hipGetErrorString(result));
}

/* Futhark's stream is not reached from here: a copy waits for what came before, and is done when it returns. */
template <typename Call>
glm_status after_stream(glm_device* device, size_t bytes, const char* name, Call&& call) {
  if (bytes == 0) return GLM_OK;
  const glm_status status = synchronize(device);
  return status != GLM_OK ? status : on_device(device, name, call);
}

glm_status copy(glm_device* device, void* to, const void* from, size_t bytes, hipMemcpyKind kind) {
  return after_stream(device, bytes, "hipMemcpy", [&] {
    const hipError_t result = hipMemcpy(to, from, bytes, kind);
    return result == hipSuccess ? hipStreamSynchronize(nullptr) : result;
  });
}

}  // namespace

const uint32_t kTableFlags = 0;

glm_status memory_info(glm_device* device, size_t* free_bytes, size_t* total_bytes) {
  return on_device(device, "hipMemGetInfo", [&] { return hipMemGetInfo(free_bytes, total_bytes); });
}

glm_status memory_alloc(glm_device* device, size_t bytes, void** out) {
  *out = nullptr;
  return on_device(device, "hipMalloc", [&] { return hipMalloc(out, bytes == 0 ? 1 : bytes); });
}

glm_status memory_free(glm_device* device, void* data) {
  if (data == nullptr) return GLM_OK;
  return on_device(device, "hipFree", [&] { return hipFree(data); });
}

glm_status host_alloc(glm_device* device, size_t bytes, void** out) {
  *out = nullptr;
  return on_device(device, "hipHostMalloc",
                   [&] { return hipHostMalloc(out, bytes == 0 ? 1 : bytes, hipHostMallocDefault); });
}

glm_status host_free(glm_device* device, void* data) {
  if (data == nullptr) return GLM_OK;
  return on_device(device, "hipHostFree", [&] { return hipHostFree(data); });
}

glm_status copy_in(glm_device* device, void* to, const void* from, size_t bytes) {
  return copy(device, to, from, bytes, hipMemcpyHostToDevice);
}

glm_status copy_out(glm_device* device, void* to, const void* from, size_t bytes) {
  return copy(device, to, from, bytes, hipMemcpyDeviceToHost);
}

glm_status fill(glm_device* device, void* data, uint8_t byte, size_t bytes) {
  return after_stream(device, bytes, "hipMemset", [&] {
    const hipError_t result = hipMemset(data, byte, bytes);
    return result == hipSuccess ? hipStreamSynchronize(nullptr) : result;
  });
}

}  // namespace glm::fut

/* In the default stream, which Futhark's waits for, and which waits for Futhark's. */
glm_status glm_keep(glm_device* device, glm_raw_memory to, glm_raw_memory from, int64_t bytes) {
  return glm::fut::on_device(device, "hipMemcpyAsync", [&] {
    return hipMemcpyAsync(to, from, static_cast<size_t>(bytes), hipMemcpyDeviceToDevice, nullptr);
  });
}
