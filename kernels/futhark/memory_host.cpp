#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "device.h"

namespace glm::fut {

namespace {

constexpr size_t kAlignment = 256;

}  // namespace

const uint32_t kTableFlags = GLM_TABLE_HOST_MEMORY;

glm_status memory_info(glm_device*, size_t* free_bytes, size_t* total_bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  *free_bytes = page * static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES));
  *total_bytes = page * static_cast<size_t>(sysconf(_SC_PHYS_PAGES));
  return GLM_OK;
}

glm_status memory_alloc(glm_device*, size_t bytes, void** out) {
  size_t rounded = 0;
  const bool overflow = __builtin_add_overflow(bytes, kAlignment, &rounded);
  rounded -= rounded % kAlignment;
  *out = overflow ? nullptr : std::aligned_alloc(kAlignment, rounded);
  return *out == nullptr ? GLM_OUT_OF_MEMORY : GLM_OK;
}

glm_status memory_free(glm_device*, void* data) {
  std::free(data);
  return GLM_OK;
}

glm_status host_alloc(glm_device* device, size_t bytes, void** out) {
  return memory_alloc(device, bytes, out);
}

glm_status host_free(glm_device* device, void* data) {
  return memory_free(device, data);
}

glm_status copy_in(glm_device*, void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return GLM_OK;
}

glm_status copy_out(glm_device* device, void* to, const void* from, size_t bytes) {
  return copy_in(device, to, from, bytes);
}

glm_status fill(glm_device*, void* data, uint8_t byte, size_t bytes) {
  if (bytes > 0) std::memset(data, byte, bytes);
  return GLM_OK;
}

}  // namespace glm::fut

glm_status glm_keep(glm_device*, glm_raw_memory to, glm_raw_memory from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return GLM_OK;
}
