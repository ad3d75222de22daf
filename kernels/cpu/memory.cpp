#include "memory.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

struct glm_event {
  std::chrono::steady_clock::time_point recorded;
};

namespace glm::cpu {

namespace {

constexpr size_t kAlignment = 256;

}  // namespace

const char* last_error(const glm_device*) {
  return "";
}

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

glm_status copy(glm_device*, void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return GLM_OK;
}

glm_status fill(glm_device*, void* data, uint8_t byte, size_t bytes) {
  if (bytes > 0) std::memset(data, byte, bytes);
  return GLM_OK;
}

glm_status update_pages(glm_device*, const glm_slots* slots, const glm_page_update* updates, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    slots->page_table[int64_t{updates[i].slot} * slots->max_pages + updates[i].index] = updates[i].page;
  }
  return GLM_OK;
}

glm_status synchronize(glm_device*) {
  return GLM_OK;
}

glm_status event_create(glm_device*, glm_event** out) {
  *out = new (std::nothrow) glm_event{};
  return *out == nullptr ? GLM_OUT_OF_MEMORY : GLM_OK;
}

void event_destroy(glm_device*, glm_event* event) {
  delete event;
}

glm_status event_record(glm_device*, glm_event* event) {
  event->recorded = std::chrono::steady_clock::now();
  return GLM_OK;
}

glm_status event_wait(glm_device*, glm_event*) {
  return GLM_OK;
}

glm_status event_elapsed(glm_device*, glm_event* from, glm_event* to, uint64_t* nanoseconds) {
  const auto elapsed = std::chrono::nanoseconds(to->recorded - from->recorded);
  *nanoseconds = static_cast<uint64_t>(elapsed.count());
  return GLM_OK;
}

}  // namespace glm::cpu
