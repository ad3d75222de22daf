#include <algorithm>
#include <cstdlib>

#include "device.h"

namespace glm::fut {

namespace {

constexpr size_t kHostAlignment = 64;

glm_status status_of(glm_device* device, cl_int result, const std::string& what) {
  if (result == CL_SUCCESS) return GLM_OK;
  const bool no_memory = result == CL_MEM_OBJECT_ALLOCATION_FAILURE || result == CL_OUT_OF_RESOURCES ||
                         result == CL_OUT_OF_HOST_MEMORY || result == CL_INVALID_BUFFER_SIZE;
  const glm_status status = no_memory ? GLM_OUT_OF_MEMORY : GLM_DEVICE_ERROR;
  return failed(device, status, what + ": OpenCL error " + std::to_string(result));
}

cl_command_queue queue_of(glm_device* device) {
  return static_cast<cl_command_queue>(glm_context_driver(device->context));
}

template <typename Value>
Value queue_info(glm_device* device, cl_command_queue_info what) {
  Value value{};
  clGetCommandQueueInfo(queue_of(device), what, sizeof(value), &value, nullptr);
  return value;
}

template <typename Value>
Value device_info(glm_device* device, cl_device_info what) {
  Value value{};
  clGetDeviceInfo(queue_info<cl_device_id>(device, CL_QUEUE_DEVICE), what, sizeof(value), &value, nullptr);
  return value;
}

cl_mem new_buffer(glm_device* device, size_t bytes, cl_int* error) {
  return clCreateBuffer(queue_info<cl_context>(device, CL_QUEUE_CONTEXT), CL_MEM_READ_WRITE, bytes, nullptr, error);
}

/* After what runs already, whose failures it reports. */
template <typename Call>
glm_status at_address(glm_device* device, const char* name, const void* data, size_t bytes, Call&& call) {
  if (bytes == 0) return GLM_OK;
  const Buffers::Place place = device->buffers.find(data);
  if (place.rest < bytes) {
    return failed(device, GLM_INVALID_ARGUMENT,
                  std::string(name) + ": " + std::to_string(bytes) + " bytes from there are not the device's memory");
  }
  const glm_status status = synchronize(device);
  return status != GLM_OK ? status : status_of(device, call(place), name);
}

glm_status copied(glm_device* device, const std::string& what, const Buffers::Place& place, glm_span* span) {
  cl_int error = CL_SUCCESS;
  span->memory = new_buffer(device, span->bytes, &error);
  if (error != CL_SUCCESS) return status_of(device, error, what);
  error = clEnqueueCopyBuffer(queue_of(device), place.buffer, span->memory, place.offset, 0, span->bytes, 0, nullptr,
                              nullptr);
  return status_of(device, error, what);
}

}  // namespace

const uint32_t kTableFlags = 0;

/* OpenCL does not say what is free: what this table has not taken. */
glm_status memory_info(glm_device* device, size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = device_info<cl_ulong>(device, CL_DEVICE_GLOBAL_MEM_SIZE);
  *free_bytes = *total_bytes - std::min(*total_bytes, device->buffers.bytes());
  return GLM_OK;
}

glm_status memory_alloc(glm_device* device, size_t bytes, void** out) {
  *out = nullptr;
  const size_t size = bytes == 0 ? 1 : bytes;
  const auto most = device_info<cl_ulong>(device, CL_DEVICE_MAX_MEM_ALLOC_SIZE);
  if (size > most) {
    return failed(device, GLM_OUT_OF_MEMORY,
                  std::to_string(size) + " bytes; the device has buffers of at most " + std::to_string(most));
  }
  cl_int error = CL_SUCCESS;
  cl_mem buffer = new_buffer(device, size, &error);
  if (error != CL_SUCCESS) return status_of(device, error, "clCreateBuffer");
  /* Drivers give a buffer its memory when it is first used. */
  const uint8_t zero = 0;
  error = clEnqueueFillBuffer(queue_of(device), buffer, &zero, 1, 0, 1, 0, nullptr, nullptr);
  if (error == CL_SUCCESS) *out = device->buffers.add(buffer, size);
  if (*out == nullptr) clReleaseMemObject(buffer);
  if (error != CL_SUCCESS) return status_of(device, error, "clEnqueueFillBuffer");
  return *out == nullptr ? failed(device, GLM_OUT_OF_MEMORY, "no address space for a buffer") : GLM_OK;
}

glm_status memory_free(glm_device* device, void* data) {
  if (data == nullptr) return GLM_OK;
  const glm_status status = synchronize(device);
  if (device->buffers.remove(data)) return status;
  return failed(device, GLM_INVALID_ARGUMENT, "memory_free: no memory of the device begins there");
}

glm_status host_alloc(glm_device*, size_t bytes, void** out) {
  const size_t rounded = (bytes / kHostAlignment + 1) * kHostAlignment;
  *out = std::aligned_alloc(kHostAlignment, rounded);
  return *out == nullptr ? GLM_OUT_OF_MEMORY : GLM_OK;
}

glm_status host_free(glm_device*, void* data) {
  std::free(data);
  return GLM_OK;
}

glm_status copy_in(glm_device* device, void* to, const void* from, size_t bytes) {
  return at_address(device, "copy_in", to, bytes, [&](const Buffers::Place& place) {
    return clEnqueueWriteBuffer(queue_of(device), place.buffer, CL_TRUE, place.offset, bytes, from, 0, nullptr,
                                nullptr);
  });
}

glm_status copy_out(glm_device* device, void* to, const void* from, size_t bytes) {
  return at_address(device, "copy_out", from, bytes, [&](const Buffers::Place& place) {
    return clEnqueueReadBuffer(queue_of(device), place.buffer, CL_TRUE, place.offset, bytes, to, 0, nullptr, nullptr);
  });
}

glm_status fill(glm_device* device, void* data, uint8_t byte, size_t bytes) {
  return at_address(device, "fill", data, bytes, [&](const Buffers::Place& place) {
    return clEnqueueFillBuffer(queue_of(device), place.buffer, &byte, 1, place.offset, bytes, 0, nullptr, nullptr);
  });
}

}  // namespace glm::fut

using namespace glm::fut;

glm_status glm_keep(glm_device* device, glm_raw_memory to, glm_raw_memory from, int64_t bytes) {
  const cl_int error =
      clEnqueueCopyBuffer(queue_of(device), from, to, 0, 0, static_cast<size_t>(bytes), 0, nullptr, nullptr);
  return status_of(device, error, "clEnqueueCopyBuffer");
}

glm_status glm_span_open(glm_device* device, const char* entry, const char* array, const void* data, int64_t bytes,
                         bool written, glm_span* span) {
  if (data == nullptr || bytes == 0) return GLM_OK;
  const std::string what = std::string(entry) + ": " + array;
  const Buffers::Place place = device->buffers.find(data);
  if (place.buffer == nullptr) return failed(device, GLM_INVALID_ARGUMENT, what + " is not in the device's memory");
  const size_t alignment = device_info<cl_uint>(device, CL_DEVICE_MEM_BASE_ADDR_ALIGN) / 8;
  span->data = data;
  span->bytes = std::min(place.rest, static_cast<size_t>(bytes));
  span->copied = place.offset % alignment != 0;
  span->written = written;
  if (written && !device->buffers.begin_write(data, span->bytes, span->copied)) {
    span->written = false;
    return failed(device, GLM_UNSUPPORTED,
                  what + " begins at no multiple of " + std::to_string(alignment) + " bytes beside another result");
  }
  if (span->copied) return copied(device, what, place, span);
  return status_of(device, device->buffers.view(data, span->bytes, &span->memory), what);
}

glm_status glm_span_close(glm_device* device, glm_span* span, glm_status status) {
  if (span->written) device->buffers.end_write(span->data);
  if (!span->copied || span->memory == nullptr) return status;
  if (span->written && status == GLM_OK) {
    const Buffers::Place place = device->buffers.find(span->data);
    const cl_int error = clEnqueueCopyBuffer(queue_of(device), span->memory, place.buffer, 0, place.offset, span->bytes,
                                             0, nullptr, nullptr);
    status = status_of(device, error, "clEnqueueCopyBuffer");
  }
  clReleaseMemObject(span->memory);
  return status;
}
