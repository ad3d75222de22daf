#include "memory/arena.h"

#include "support/error.h"

namespace glm {

size_t Arena::byte_count(const std::string& what, size_t element_bytes, std::initializer_list<int64_t> sizes) {
  size_t total = element_bytes;
  for (const int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(total, static_cast<size_t>(size), &total)) {
      fail(GLM_OUT_OF_MEMORY, what, ": its size does not fit into 64 bits");
    }
  }
  return total;
}

void* Arena::allocate_bytes(const std::string& what, size_t bytes) {
  size_t rounded = 0;
  const bool overflow = __builtin_add_overflow(bytes, kAlignment, &rounded);
  rounded -= rounded % kAlignment;
  std::unique_ptr<void, Free> block(overflow ? nullptr : std::aligned_alloc(kAlignment, rounded));
  if (!block) {
    fail(GLM_OUT_OF_MEMORY, "out of memory: ", bytes, " bytes for ", what);
  }
  blocks_.push_back(std::move(block));
  bytes_ += bytes;
  return blocks_.back().get();
}

}  // namespace glm
