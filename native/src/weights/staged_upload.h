// How one loading thread brings weights to a device with memory of its own: through two buffers that copies reach
// directly, so that one is filled from the file while the other is on its way.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>

#include "memory/device.h"

namespace glm {

class StagedUpload {
 public:
  static constexpr int64_t kBuffers = 2;

  // `stream` guards the device's stream among the loading threads. `memory`: the host's, page-locked, for kBuffers buffers.
  StagedUpload(const Device& device, std::mutex& stream, std::byte* memory, int64_t buffer_bytes);
  ~StagedUpload();

  // The buffer to fill next, free again.
  std::byte* buffer();
  // Sends the first `bytes` of it on their way.
  void send(std::byte* to, size_t bytes);

 private:
  struct Buffer {
    std::byte* data;
    Event passed;
  };

  const Device& device_;
  std::mutex& stream_;
  std::array<Buffer, kBuffers> buffers_;
  size_t next_ = 0;
};

}  // namespace glm
