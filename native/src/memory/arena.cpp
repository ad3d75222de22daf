#include "memory/arena.h"

#include <algorithm>
#include <utility>

#include "support/error.h"

namespace glm {
namespace {

constexpr size_t kAlignment = 256;
// Where each allocation costs a call to a driver and whole pages, small arrays share a block.
constexpr size_t kSharedBlockBytes = 8 << 20;
constexpr size_t kLargestShared = kSharedBlockBytes / 8;

}  // namespace

Arena::~Arena() {
  const auto release = kind_ == Kind::kDevice ? device_.kernels().memory_free : device_.kernels().host_free;
  for (void* block : blocks_) release(device_.handle(), block);
}

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
  if (device_.host_memory() || bytes > kLargestShared) return allocate_block(what, bytes);
  const size_t rounded = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (rounded > rest_bytes_) {
    rest_ = allocate_block(what, kSharedBlockBytes);
    rest_bytes_ = kSharedBlockBytes;
  }
  rest_bytes_ -= rounded;
  return std::exchange(rest_, rest_ + rounded);
}

std::byte* Arena::allocate_block(const std::string& what, size_t bytes) {
  const auto allocate = kind_ == Kind::kDevice ? device_.kernels().memory_alloc : device_.kernels().host_alloc;
  void* block = nullptr;
  const glm_status status = allocate(device_.handle(), bytes, &block);
  if (status == GLM_OUT_OF_MEMORY) {
    device_.require_free(what, bytes);
    fail(GLM_OUT_OF_MEMORY, "out of memory: ", bytes, " bytes for ", what, device_.last_error());
  }
  device_.check(status, "an allocation");
  blocks_.push_back(block);
  bytes_ += bytes;
  return static_cast<std::byte*>(block);
}

}  // namespace glm
