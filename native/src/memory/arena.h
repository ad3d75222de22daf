// Memory that lives as long as the engine: allocated while it is created, never afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

namespace glm {

class Arena {
 public:
  static constexpr size_t kAlignment = 64;

  // An array of the product of `sizes` elements, its contents undefined. Throws GLM_OUT_OF_MEMORY, with the bytes and
  // `what`, also where the size does not fit into size_t. An array of no elements still has an address of its own.
  template <class T>
  T* allocate(const std::string& what, std::initializer_list<int64_t> sizes) {
    return static_cast<T*>(allocate_bytes(what, byte_count(what, sizeof(T), sizes)));
  }
  void* allocate_bytes(const std::string& what, size_t bytes);

  static size_t byte_count(const std::string& what, size_t element_bytes, std::initializer_list<int64_t> sizes);

  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* block) const { std::free(block); }
  };
  std::vector<std::unique_ptr<void, Free>> blocks_;
  size_t bytes_ = 0;
};

}  // namespace glm
