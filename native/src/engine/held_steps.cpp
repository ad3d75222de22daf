// Steps that are held before they sample, until their masks are there.
#include <cstring>

#include "engine/engine.h"

namespace glm {

void Engine::set_masks(const uint32_t* masks) {
  throw_if_failed();
  if (held_.empty()) fail(GLM_INVALID_ARGUMENT, "no step is held for masks, expected one with num_masks above 0");
  const Staging& staging = *held_.front();
  std::memcpy(staging.block.step.masks, masks, staging.block.mask_bytes(staging.num_masks));
  held_.pop_front();
  {
    const std::lock_guard lock(mutex_);
    ++masked_;
  }
  changed_.notify_all();
}

// False: they will not come. Masks come in the order of the steps that are held for them.
bool Engine::wait_for_masks() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return masked_ > 0 || failed_ || stop_; });
  if (masked_ == 0) return false;
  --masked_;
  return true;
}

}  // namespace glm
