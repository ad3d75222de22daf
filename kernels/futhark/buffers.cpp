#include "buffers.h"

#include <sys/mman.h>

#include <algorithm>

namespace glm::fut {

Buffers::~Buffers() {
  for (const auto& [data, block] : blocks_) release(data, block);
}

void Buffers::release(const char* data, const Block& block) {
  for (const auto& [where, view] : block.views) clReleaseMemObject(view);
  clReleaseMemObject(block.buffer);
  munmap(const_cast<char*>(data), block.bytes);
}

void* Buffers::add(cl_mem buffer, size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  blocks_.emplace(static_cast<const char*>(data), Block{buffer, bytes, {}});
  bytes_ += bytes;
  return data;
}

bool Buffers::remove(const void* data) {
  const auto block = blocks_.find(static_cast<const char*>(data));
  if (block == blocks_.end()) return false;
  release(block->first, block->second);
  bytes_ -= block->second.bytes;
  blocks_.erase(block);
  return true;
}

std::map<const char*, Buffers::Block>::const_iterator Buffers::block_of(const void* data) const {
  const auto* address = static_cast<const char*>(data);
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return blocks_.end();
  --after;
  return static_cast<size_t>(address - after->first) < after->second.bytes ? after : blocks_.end();
}

Buffers::Place Buffers::find(const void* data) const {
  const auto block = block_of(data);
  if (block == blocks_.end()) return {};
  const auto offset = static_cast<size_t>(static_cast<const char*>(data) - block->first);
  return {block->second.buffer, offset, block->second.bytes - offset};
}

cl_int Buffers::view(const void* data, size_t bytes, cl_mem* out) {
  const char* start = block_of(data)->first;
  const auto offset = static_cast<size_t>(static_cast<const char*>(data) - start);
  Block& block = blocks_.at(start);
  cl_mem& view = block.views[{offset, bytes}];
  cl_int error = CL_SUCCESS;
  if (view == nullptr) {
    const cl_buffer_region region = {offset, bytes};
    view = clCreateSubBuffer(block.buffer, CL_MEM_READ_WRITE, CL_BUFFER_CREATE_TYPE_REGION, &region, &error);
  }
  *out = view;
  if (error != CL_SUCCESS) block.views.erase({offset, bytes});
  return error;
}

bool Buffers::begin_write(const void* data, size_t bytes, bool copied) {
  const auto* start = static_cast<const char*>(data);
  const auto clash = [&](const Written& other) {
    return (copied || other.copied) && start < other.data + other.bytes && other.data < start + bytes;
  };
  if (std::any_of(written_.begin(), written_.end(), clash)) return false;
  written_.push_back({start, bytes, copied});
  return true;
}

void Buffers::end_write(const void* data) {
  std::erase_if(written_, [&](const Written& span) { return span.data == data; });
}

}  // namespace glm::fut
