#include <chrono>
#include <new>

#include "device.h"

struct glm_event {
  std::chrono::steady_clock::time_point recorded;
};

namespace glm::fut {

glm_status synchronize(glm_device* device) {
  futhark_context* context = glm_context(device);
  return glm_entry_status(device, glm_context_sync(context), "stream");
}

glm_status update_pages(glm_device* device, const glm_slots* slots, const glm_page_update* updates, int32_t count) {
  const glm_update_pages_args args = {.rows = count, .slots = slots, .updates = updates};
  return glm_futhark_update_pages(device, &args);
}

glm_status event_create(glm_device*, glm_event** out) {
  *out = new (std::nothrow) glm_event{};
  return *out == nullptr ? GLM_OUT_OF_MEMORY : GLM_OK;
}

void event_destroy(glm_device*, glm_event* event) {
  delete event;
}

/* Futhark has no events to wait for beside its stream: what is recorded has run. */
glm_status event_record(glm_device* device, glm_event* event) {
  const glm_status status = synchronize(device);
  event->recorded = std::chrono::steady_clock::now();
  return status;
}

glm_status event_wait(glm_device*, glm_event*) {
  return GLM_OK;
}

glm_status event_elapsed(glm_device*, glm_event* from, glm_event* to, uint64_t* nanoseconds) {
  const auto elapsed = std::chrono::nanoseconds(to->recorded - from->recorded);
  *nanoseconds = static_cast<uint64_t>(elapsed.count());
  return GLM_OK;
}

}  // namespace glm::fut
