#include "memory/device.h"

#include <utility>

#include "support/error.h"

namespace glm {

size_t Device::free_bytes() const {
  size_t free = 0;
  size_t total = 0;
  check(kernels_.memory_info(handle_, &free, &total), "memory_info");
  return free;
}

void Device::require_free(const std::string& what, size_t bytes) const {
  if (host_memory()) return;
  const size_t free = free_bytes();
  if (bytes > free) {
    fail(GLM_OUT_OF_MEMORY, "out of memory: ", bytes, " bytes for ", what, ", but ", free, " are free: ", bytes - free,
         " are missing");
  }
}

void Device::copy_in(void* to, const void* from, size_t bytes) const {
  check(kernels_.copy_in(handle_, to, from, bytes), "copy_in");
}

void Device::copy_out(void* to, const void* from, size_t bytes) const {
  check(kernels_.copy_out(handle_, to, from, bytes), "copy_out");
}

void Device::fill(void* data, uint8_t byte, size_t bytes) const {
  check(kernels_.fill(handle_, data, byte, bytes), "fill");
}

void Device::update_pages(const glm_slots& slots, const glm_page_update* updates, int32_t count) const {
  if (count > 0) check(kernels_.update_pages(handle_, &slots, updates, count), "update_pages");
}

void Device::synchronize() const {
  check(kernels_.synchronize(handle_), "synchronize");
}

void Device::check(glm_status status, const char* what) const {
  if (status == GLM_OK) [[likely]]
    return;
  fail(status, "kernel table ", kernels_.name, ": ", what, " failed", last_error());
}

std::string Device::last_error() const {
  const std::string text = kernels_.last_error(handle_);
  return text.empty() ? text : ": " + text;
}

Event::Event(const Device& device) : device_(&device) {
  device.check(device.kernels().event_create(device.handle(), &event_), "event_create");
}

Event::~Event() {
  if (event_ != nullptr) device_->kernels().event_destroy(device_->handle(), event_);
}

Event::Event(Event&& other) noexcept : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}

void Event::record() const {
  device_->check(device_->kernels().event_record(device_->handle(), event_), "event_record");
}

void Event::wait() const {
  device_->check(device_->kernels().event_wait(device_->handle(), event_), "event_wait");
}

uint64_t Event::nanoseconds_until(const Event& later) const {
  uint64_t nanoseconds = 0;
  device_->check(device_->kernels().event_elapsed(device_->handle(), event_, later.event_, &nanoseconds),
                 "event_elapsed");
  return nanoseconds;
}

Graph::Graph(const Device& device) : device_(&device) {
  device.check(device.kernels().graph_begin(device.handle()), "graph_begin");
}

Graph::~Graph() {
  if (graph_ != nullptr) device_->kernels().graph_free(device_->handle(), graph_);
}

Graph::Graph(Graph&& other) noexcept : device_(other.device_), graph_(std::exchange(other.graph_, nullptr)) {}

void Graph::finish() {
  device_->check(device_->kernels().graph_end(device_->handle(), &graph_), "graph_end");
}

void Graph::launch() const {
  device_->check(device_->kernels().graph_launch(device_->handle(), graph_), "graph_launch");
}

}  // namespace glm
