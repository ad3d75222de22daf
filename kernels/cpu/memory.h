/* Memory and stream of the CPU as a device: memory is the host's, and a call has run when it returns. */
#ifndef GLM_CPU_MEMORY_H
#define GLM_CPU_MEMORY_H

#include <cstddef>
#include <cstdint>

#include "glm/kernels.h"

namespace glm::cpu {

const char* last_error(const glm_device* device);
glm_status memory_info(glm_device* device, size_t* free_bytes, size_t* total_bytes);
glm_status memory_alloc(glm_device* device, size_t bytes, void** out);
glm_status memory_free(glm_device* device, void* data);
glm_status copy(glm_device* device, void* to, const void* from, size_t bytes);
glm_status fill(glm_device* device, void* data, uint8_t byte, size_t bytes);
glm_status update_pages(glm_device* device, const glm_slots* slots, const glm_page_update* updates, int32_t count);
glm_status synchronize(glm_device* device);
glm_status event_create(glm_device* device, glm_event** out);
void event_destroy(glm_device* device, glm_event* event);
glm_status event_record(glm_device* device, glm_event* event);
glm_status event_wait(glm_device* device, glm_event* event);
glm_status event_elapsed(glm_device* device, glm_event* from, glm_event* to, uint64_t* nanoseconds);

}  // namespace glm::cpu

#endif
