#include <cstdio>
#include <memory>

#include "device.h"

namespace glm::cuda {

namespace {

/* The architectures this object holds machine code for (CMakeLists.txt). */
bool is_supported(const cudaDeviceProp& properties) {
  return (properties.major == 9 || properties.major == 10) && properties.minor == 0;
}

glm_status describe_failure(cudaError_t result, const char* what, char* error, size_t error_size) {
  std::snprintf(error, error_size, "%s: %s (%s)", what, cudaGetErrorString(result), cudaGetErrorName(result));
  return GLM_DEVICE_ERROR;
}

glm_status select(int ordinal, cudaDeviceProp* properties, char* error, size_t error_size) {
  int count = 0;
  if (cudaError_t result = cudaGetDeviceCount(&count); result != cudaSuccess) {
    describe_failure(result, "no usable CUDA driver or GPU; install the NVIDIA driver for CUDA 13", error, error_size);
    return GLM_UNSUPPORTED;
  }
  if (ordinal < 0 || ordinal >= count) {
    std::snprintf(error, error_size, "ordinal is %d; this machine has GPUs 0 to %d", ordinal, count - 1);
    return GLM_INVALID_ARGUMENT;
  }
  if (cudaError_t result = cudaGetDeviceProperties(properties, ordinal); result != cudaSuccess) {
    return describe_failure(result, "cudaGetDeviceProperties", error, error_size);
  }
  if (!is_supported(*properties)) {
    std::snprintf(error, error_size, "GPU %d (%s) has compute capability %d.%d; this build supports 9.0 and 10.0",
                  ordinal, properties->name, properties->major, properties->minor);
    return GLM_UNSUPPORTED;
  }
  return GLM_OK;
}

cudaError_t create(glm_device* device) {
  if (cudaError_t result = cudaSetDevice(device->ordinal); result != cudaSuccess) return result;
  if (cudaError_t result = cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking); result != cudaSuccess) {
    return result;
  }
  return create_branch(device);
}

}  // namespace

glm_status device_open(const glm_device_options* options, glm_device** out, char* error, size_t error_size) {
  *out = nullptr;
  cudaDeviceProp properties;
  if (glm_status status = select(options->ordinal, &properties, error, error_size); status != GLM_OK) return status;
  auto device = std::make_unique<glm_device>();
  device->ordinal = options->ordinal;
  device->sm_count = properties.multiProcessorCount;
  device->has_wgmma = properties.major == 9;
  device->description = std::string("cuda ") + properties.name + ", " + std::to_string(device->sm_count) + " SMs";
  if (cudaError_t result = create(device.get()); result != cudaSuccess) {
    device_close(device.release());
    return describe_failure(result, "cannot set up a stream on the GPU", error, error_size);
  }
  *out = device.release();
  return GLM_OK;
}

void device_close(glm_device* device) {
  if (device == nullptr) return;
  if (device->stream != nullptr) {
    cudaStreamSynchronize(device->stream);
    cudaStreamDestroy(device->stream);
  }
  destroy_branch(device);
  delete device;
}

const char* device_description(const glm_device* device) {
  return device->description.c_str();
}

void set_workspace(glm_device* device, void* data, size_t bytes) {
  device->workspace = static_cast<std::byte*>(data);
  device->workspace_bytes = bytes;
}

glm_status check(glm_device* device, cudaError_t result, const char* what) {
  if (result == cudaSuccess) return GLM_OK;
  device->last_error = std::string(what) + ": " + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) + ")";
  return result == cudaErrorMemoryAllocation ? GLM_OUT_OF_MEMORY : GLM_DEVICE_ERROR;
}

}  // namespace glm::cuda
