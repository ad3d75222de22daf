// Memory that lives as long as the engine: allocated while it is created, never afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "memory/device.h"

namespace glm {

class Arena {
 public:
  enum class Kind { kDevice, kHost };  // kHost: the host's, for copies from and to the device

  Arena(const Device& device, Kind kind) : device_(device), kind_(kind) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // An array of the product of `sizes` elements, its contents undefined. Throws GLM_OUT_OF_MEMORY, with the bytes and
  // `what`, also where the size does not fit into size_t. An array of no elements still has an address of its own.
  template <class T>
  T* allocate(const std::string& what, std::initializer_list<int64_t> sizes) {
    return static_cast<T*>(allocate_bytes(what, byte_count(what, sizeof(T), sizes)));
  }
  void* allocate_bytes(const std::string& what, size_t bytes);

  static size_t byte_count(const std::string& what, size_t element_bytes, std::initializer_list<int64_t> sizes);

  size_t bytes() const { return bytes_; }
  const Device& device() const { return device_; }

 private:
  std::byte* allocate_block(const std::string& what, size_t bytes);

  const Device& device_;
  Kind kind_;
  std::vector<void*> blocks_;
  std::byte* rest_ = nullptr;  // of the newest shared block
  size_t rest_bytes_ = 0;
  size_t bytes_ = 0;
};

}  // namespace glm
