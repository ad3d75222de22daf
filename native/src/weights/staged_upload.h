// How one loading thread brings weights to a device with memory of its own: through two buffers that copies reach
// directly, so that one is filled from the file while the other is on its way.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>

#include "memory/arena.h"
#include "memory/device.h"

namespace glm {

class StagedUpload {
 public:
  // `stream` guards the device's stream among the loading threads.
  StagedUpload(const Device& device, std::mutex& stream, size_t buffer_bytes);
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
  Arena arena_;
  std::array<Buffer, 2> buffers_;
  size_t next_ = 0;
};

}  // namespace glm
