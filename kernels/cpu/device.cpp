#include "device.h"

#include <algorithm>
#include <cstdio>
#include <new>
#include <system_error>
#include <thread>

namespace glm::cpu {

namespace {

constexpr int kMaxThreads = 1024;

/* Cores in this process's affinity mask; hardware_concurrency counts those, and 0 means it does not know. */
int usable_cores() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

glm_status device_open(const char* isa, const glm_device_options* options, glm_device** out, char* error,
                       size_t error_size) {
  *out = nullptr;
  if (options->ordinal != 0) {
    std::snprintf(error, error_size, "ordinal is %d; the cpu table has one device, 0", options->ordinal);
    return GLM_INVALID_ARGUMENT;
  }
  if (options->num_threads < 0 || options->num_threads > kMaxThreads) {
    std::snprintf(error, error_size, "num_threads is %d; allowed: 0 (one per usable core) to %d", options->num_threads,
                  kMaxThreads);
    return GLM_INVALID_ARGUMENT;
  }
  const int num_threads = options->num_threads == 0 ? usable_cores() : options->num_threads;
  try {
    std::string description = std::string("cpu ") + isa + ", " + std::to_string(num_threads) + " threads";
    *out = new glm_device{.pool = ThreadPool(num_threads), .description = std::move(description)};
  } catch (const std::system_error& failure) {
    std::snprintf(error, error_size, "cannot start %d threads: %s; lower num_threads", num_threads, failure.what());
    return GLM_DEVICE_ERROR;
  } catch (const std::bad_alloc&) {
    std::snprintf(error, error_size, "no memory for %d threads; lower num_threads", num_threads);
    return GLM_OUT_OF_MEMORY;
  }
  return GLM_OK;
}

void device_close(glm_device* device) {
  delete device;
}

const char* device_description(const glm_device* device) {
  return device->description.c_str();
}

void set_workspace(glm_device* device, void* data, size_t bytes) {
  device->workspace = static_cast<std::byte*>(data);
  device->workspace_bytes = bytes;
}

}  // namespace glm::cpu
