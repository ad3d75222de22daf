#include "device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>

namespace glm::fut {

namespace {

constexpr int kMaxThreads = 1024;

std::string description_of([[maybe_unused]] int num_threads, [[maybe_unused]] int ordinal) {
#ifdef GLM_FUTHARK_GPU
  return "futhark " GLM_FUTHARK_BACKEND ", GPU " + std::to_string(ordinal);
#else
  return "futhark " GLM_FUTHARK_BACKEND ", " + std::to_string(num_threads) + " threads";
#endif
}

/* Threads that the backend uses: one in `c`, whatever is asked for. */
int threads_of([[maybe_unused]] int asked) {
#ifdef GLM_FUTHARK_MULTICORE
  return asked > 0 ? asked : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#else
  return 1;
#endif
}

}  // namespace

glm_status failed(glm_device* device, glm_status status, std::string text) {
  device->error = std::move(text);
  return status;
}

glm_status device_open(const glm_device_options* options, glm_device** out, char* error, size_t error_size) {
  *out = nullptr;
  if (options->num_threads < 0 || options->num_threads > kMaxThreads) {
    std::snprintf(error, error_size, "num_threads is %d; allowed: 0 (one per usable core) to %d", options->num_threads,
                  kMaxThreads);
    return GLM_INVALID_ARGUMENT;
  }
  const int num_threads = threads_of(options->num_threads);
  futhark_context* context = glm_context_open(num_threads, options->ordinal, error, error_size);
  if (context == nullptr) return GLM_DEVICE_ERROR;
  *out = new (std::nothrow) glm_device{context, description_of(num_threads, options->ordinal), ""};
  if (*out != nullptr) return GLM_OK;
  glm_context_close(context);
  std::snprintf(error, error_size, "no memory for a device");
  return GLM_OUT_OF_MEMORY;
}

void device_close(glm_device* device) {
  glm_context_close(device->context);
  delete device;
}

const char* device_description(const glm_device* device) {
  return device->description.c_str();
}

const char* last_error(const glm_device* device) {
  return device->error.c_str();
}

size_t workspace_bytes(const glm_device*, glm_op, const void*) {
  return 0;
}

void set_workspace(glm_device*, void*, size_t) {}

}  // namespace glm::fut

futhark_context* glm_context(glm_device* device) {
  glm_context_enter(device->context);
  return device->context;
}

glm_status glm_entry_status(glm_device* device, int failed, const char* entry) {
  if (failed == 0) return GLM_OK;
  char* text = glm_context_error(device->context);
  std::string message = std::string(entry) + ": " + (text == nullptr ? "no memory" : text);
  std::free(text);
  return glm::fut::failed(device, GLM_DEVICE_ERROR, std::move(message));
}

glm_status glm_not_in_place(glm_device* device, const char* entry, const char* array) {
  return glm::fut::failed(device, GLM_INTERNAL, std::string(entry) + ": " + array + " was not written in place");
}

glm_status glm_unsupported(glm_device* device, const char* op, const char* what) {
  return glm::fut::failed(device, GLM_UNSUPPORTED, std::string(op) + ": the futhark table has no " + what);
}
