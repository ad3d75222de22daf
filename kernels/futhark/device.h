#ifndef GLM_FUTHARK_DEVICE_H
#define GLM_FUTHARK_DEVICE_H

#include <string>

#include "binding.h"
#include "context.h"
#ifdef GLM_FUTHARK_OPENCL
#include "buffers.h"
#endif

struct glm_device {
  futhark_context* context;
  std::string description;
  std::string error;
#ifdef GLM_FUTHARK_OPENCL
  glm::fut::Buffers buffers{};
#endif
};

namespace glm::fut {

/* Keeps the text as the device's last error. */
glm_status failed(glm_device* device, glm_status status, std::string text);

glm_status device_open(const glm_device_options* options, glm_device** out, char* error, size_t error_size);
void device_close(glm_device* device);
const char* device_description(const glm_device* device);
const char* last_error(const glm_device* device);
/* Futhark has its own memory for what an operation needs in between. */
size_t workspace_bytes(const glm_device* device, glm_op op, const void* args);
void set_workspace(glm_device* device, void* data, size_t bytes);

/* The stream: operations follow each other; these wait until they have run. */
glm_status synchronize(glm_device* device);
glm_status update_pages(glm_device* device, const glm_slots* slots, const glm_page_update* updates, int32_t count);
glm_status event_create(glm_device* device, glm_event** out);
void event_destroy(glm_device* device, glm_event* event);
glm_status event_record(glm_device* device, glm_event* event);
glm_status event_wait(glm_device* device, glm_event* event);
glm_status event_elapsed(glm_device* device, glm_event* from, glm_event* to, uint64_t* nanoseconds);

/* memory_host.cpp, memory_cuda.cpp, memory_hip.cpp or memory_opencl.cpp. */
extern const uint32_t kTableFlags;
glm_status memory_info(glm_device* device, size_t* free_bytes, size_t* total_bytes);
glm_status memory_alloc(glm_device* device, size_t bytes, void** out);
glm_status memory_free(glm_device* device, void* data);
glm_status host_alloc(glm_device* device, size_t bytes, void** out);
glm_status host_free(glm_device* device, void* data);
glm_status copy_in(glm_device* device, void* device_data, const void* host_data, size_t bytes);
glm_status copy_out(glm_device* device, void* host_data, const void* device_data, size_t bytes);
glm_status fill(glm_device* device, void* device_data, uint8_t byte, size_t bytes);

}  // namespace glm::fut

#endif
