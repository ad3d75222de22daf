#include <cuda.h>

#include "device.h"

namespace glm::fut {

namespace {

CUdeviceptr address(const void* data) {
  return reinterpret_cast<CUdeviceptr>(data);
}

glm_status status_of(glm_device* device, CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return GLM_OK;
  const char* text = nullptr;
  cuGetErrorString(result, &text);
  const glm_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? GLM_OUT_OF_MEMORY : GLM_DEVICE_ERROR;
  return failed(device, status, std::string(call) + ": " + (text == nullptr ? "unknown error" : text));
}

/* The memory is Futhark's context's: no other context of the GPU reaches it. */
template <typename Call>
glm_status in_context(glm_device* device, const char* name, Call&& call) {
  CUresult result = cuCtxPushCurrent(static_cast<CUcontext>(glm_context_driver(device->context)));
  if (result == CUDA_SUCCESS) {
    result = call();
    CUcontext popped = nullptr;
    cuCtxPopCurrent(&popped);
  }
  return status_of(device, result, name);
}

/* Futhark's stream is not reached from here: a copy waits for what came before, and is done when it returns. */
template <typename Call>
glm_status after_stream(glm_device* device, size_t bytes, const char* name, Call&& call) {
  if (bytes == 0) return GLM_OK;
  const glm_status status = synchronize(device);
  return status != GLM_OK ? status : in_context(device, name, call);
}

}  // namespace

const uint32_t kTableFlags = 0;

glm_status memory_info(glm_device* device, size_t* free_bytes, size_t* total_bytes) {
  return in_context(device, "cuMemGetInfo", [&] { return cuMemGetInfo(free_bytes, total_bytes); });
}

glm_status memory_alloc(glm_device* device, size_t bytes, void** out) {
  *out = nullptr;
  CUdeviceptr data = 0;
  const auto call = [&] { return cuMemAlloc(&data, bytes == 0 ? 1 : bytes); };
  const glm_status status = in_context(device, "cuMemAlloc", call);
  if (status == GLM_OK) *out = reinterpret_cast<void*>(data);
  return status;
}

glm_status memory_free(glm_device* device, void* data) {
  if (data == nullptr) return GLM_OK;
  return in_context(device, "cuMemFree", [&] { return cuMemFree(address(data)); });
}

glm_status host_alloc(glm_device* device, size_t bytes, void** out) {
  *out = nullptr;
  return in_context(device, "cuMemAllocHost", [&] { return cuMemAllocHost(out, bytes == 0 ? 1 : bytes); });
}

glm_status host_free(glm_device* device, void* data) {
  if (data == nullptr) return GLM_OK;
  return in_context(device, "cuMemFreeHost", [&] { return cuMemFreeHost(data); });
}

glm_status copy_in(glm_device* device, void* to, const void* from, size_t bytes) {
  return after_stream(device, bytes, "cuMemcpyHtoD", [&] {
    const CUresult result = cuMemcpyHtoD(address(to), from, bytes);
    return result == CUDA_SUCCESS ? cuStreamSynchronize(nullptr) : result;
  });
}

glm_status copy_out(glm_device* device, void* to, const void* from, size_t bytes) {
  return after_stream(device, bytes, "cuMemcpyDtoH", [&] { return cuMemcpyDtoH(to, address(from), bytes); });
}

glm_status fill(glm_device* device, void* data, uint8_t byte, size_t bytes) {
  return after_stream(device, bytes, "cuMemsetD8", [&] {
    const CUresult result = cuMemsetD8(address(data), byte, bytes);
    return result == CUDA_SUCCESS ? cuStreamSynchronize(nullptr) : result;
  });
}

}  // namespace glm::fut

/* In the default stream, which Futhark's waits for, and which waits for Futhark's. */
glm_status glm_keep(glm_device* device, glm_raw_memory to, glm_raw_memory from, int64_t bytes) {
  return glm::fut::in_context(device, "cuMemcpyDtoD",
                              [&] { return cuMemcpyDtoDAsync(to, from, static_cast<size_t>(bytes), nullptr); });
}
