/* Events and page updates of a CUDA device's stream, for the table. */
#ifndef GLM_CUDA_STREAM_H
#define GLM_CUDA_STREAM_H

#include "glm/kernels.h"

namespace glm::cuda {

glm_status fill(glm_device* device, void* device_data, uint8_t byte, size_t bytes);
glm_status update_pages(glm_device* device, const glm_slots* slots, const glm_page_update* updates, int32_t count);
glm_status event_create(glm_device* device, glm_event** out);
void event_destroy(glm_device* device, glm_event* event);
glm_status event_record(glm_device* device, glm_event* event);
glm_status event_wait(glm_device* device, glm_event* event);
glm_status event_elapsed(glm_device* device, glm_event* from, glm_event* to, uint64_t* nanoseconds);
void graph_free(glm_device* device, glm_graph* graph);

}  // namespace glm::cuda

#endif
