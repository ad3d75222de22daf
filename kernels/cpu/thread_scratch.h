#ifndef GLM_CPU_THREAD_SCRATCH_H
#define GLM_CPU_THREAD_SCRATCH_H

#include "device.h"
#include "workspace.h"

GLM_CPU_BEGIN

/* `count` floats for each thread of a device, as the whole of an operation's workspace. */
class ThreadScratch {
 public:
  ThreadScratch(const glm_device* device, std::byte* base, int64_t count)
      : layout_(base), pitch_((static_cast<size_t>(count) + 15) / 16 * 16) {
    floats_ = layout_.take<float>(static_cast<size_t>(device->pool.num_threads()) * pitch_);
  }
  float* of(int thread) const { return floats_ + static_cast<size_t>(thread) * pitch_; }
  size_t bytes() const { return layout_.bytes(); }

 private:
  WorkspaceLayout layout_;
  size_t pitch_;
  float* floats_;
};

GLM_CPU_END

#endif
