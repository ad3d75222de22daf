// The device of a kernel table: its memory and its one stream. What fails is thrown with the table's own text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "glm/kernels.h"

namespace glm {

class Device {
 public:
  Device(const glm_kernels& kernels, glm_device* handle) : kernels_(kernels), handle_(handle) {}

  const glm_kernels& kernels() const { return kernels_; }
  glm_device* handle() const { return handle_; }

  // The host reads and writes device memory as its own.
  bool host_memory() const { return (kernels_.flags & GLM_TABLE_HOST_MEMORY) != 0; }
  bool has_graphs() const { return kernels_.graph_begin != nullptr; }

  size_t free_bytes() const;
  // Throws GLM_OUT_OF_MEMORY, with what is missing, if less than `bytes` is free. Host memory is not asked for: the
  // system's own count of what is free says little about what can be had.
  void require_free(const std::string& what, size_t bytes) const;

  void copy_in(void* to, const void* from, size_t bytes) const;
  void copy_out(void* to, const void* from, size_t bytes) const;
  void fill(void* data, uint8_t byte, size_t bytes) const;
  void update_pages(const glm_slots& slots, const glm_page_update* updates, int32_t count) const;
  void synchronize() const;

  // Throws what `status` says of the call `what`, unless it is GLM_OK.
  void check(glm_status status, const char* what) const;
  // ": text" of the last failure, or nothing where the table has no text for it.
  std::string last_error() const;

 private:
  const glm_kernels& kernels_;
  glm_device* handle_;
};

// A mark in the device's stream.
class Event {
 public:
  explicit Event(const Device& device);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&&) = delete;

  void record() const;
  void wait() const;  // from any thread
  uint64_t nanoseconds_until(const Event& later) const;

 private:
  const Device* device_;
  glm_event* event_ = nullptr;
};

// Calls between its making and `finish` are recorded; `launch` runs them in the stream.
class Graph {
 public:
  explicit Graph(const Device& device);
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&&) = delete;

  void finish();
  void launch() const;

 private:
  const Device* device_;
  glm_graph* graph_ = nullptr;
};

}  // namespace glm
