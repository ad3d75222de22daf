#include "weights/staged_upload.h"

namespace glm {

StagedUpload::StagedUpload(const Device& device, std::mutex& stream, std::byte* memory, int64_t buffer_bytes)
    : device_(device),
      stream_(stream),
      buffers_{Buffer{memory, Event(device)}, Buffer{memory + buffer_bytes, Event(device)}} {}

// The copies still read the buffers; whether they went well is for the loader's synchronize to tell.
StagedUpload::~StagedUpload() {
  const std::lock_guard lock(stream_);
  device_.kernels().synchronize(device_.handle());
}

std::byte* StagedUpload::buffer() {
  const Buffer& buffer = buffers_[next_];
  buffer.passed.wait();
  return buffer.data;
}

void StagedUpload::send(std::byte* to, size_t bytes) {
  const Buffer& buffer = buffers_[next_];
  const std::lock_guard lock(stream_);
  device_.copy_in(to, buffer.data, bytes);
  buffer.passed.record();
  next_ = (next_ + 1) % buffers_.size();
}

}  // namespace glm
