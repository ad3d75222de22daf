/* Operations that run beside the one before them.
 *
 * Of two calls in a row of which neither writes what the other touches, the second need not wait for the first. Its first kernel starts once
 * all blocks of its predecessor run, and waits before it ends: so whoever waits for it has waited for both. Before that it may read
 * what had been written when its predecessor began, because a kernel that leaves room beside itself releases its
 * successor only after its own wait. It reads that from the L2, past the L1, which no wait has cleaned. */
#ifndef GLM_CUDA_BESIDE_H
#define GLM_CUDA_BESIDE_H

#include "branch.h"
#include "device.h"

namespace glm::cuda {

/* A call of an operation that leaves room beside itself. In scope while its kernels are launched: a call that launches none, as of no rows, has
 * no turn, or the next would take the kernel before it for its own. */
class Turn {
 public:
  Turn(glm_device* device, const Touched& touched, LineOfCall::Kind kind = LineOfCall::Kind::kMain)
      : device_(device), touched_(touched), line_(device, touched, kind) {
    const LastTurn& last = device->last_turn;
    beside_ = !line_.is_branch() && !joins_branch(device) && last.launches == device->launches && !last.ends_beside &&
              !touched.meets(last.touched);
  }
  ~Turn() {
    if (!line_.is_branch()) device_->last_turn = {touched_, device_->launches, device_->launched_beside};
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  /* Whether the first kernel may run beside its predecessor. */
  bool beside() const { return beside_; }

 private:
  glm_device* device_;
  Touched touched_;
  LineOfCall line_;
  bool beside_;
};

}  // namespace glm::cuda

#endif
