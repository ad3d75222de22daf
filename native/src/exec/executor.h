// Walks the list of bound ops.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "exec/binder.h"
#include "exec/driver.h"
#include "exec/op_range.h"
#include "exec/own_rows.h"
#include "memory/device.h"

namespace glm {

const char* status_name(glm_status status);

// The op that a thread is in, for other threads to see. One thread writes.
struct OpMark {
  std::atomic<const BoundOp*> op = nullptr;  // NULL: none
  std::atomic<uint64_t> calls = 0;           // begun so far
};
// Drivers write it as plain words.
static_assert(sizeof(OpMark) == sizeof(glm_driver_mark) && std::atomic<const BoundOp*>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);

// "op linear layers.3.attn.o".
std::string describe(const BoundOp& op);
// Whether ranks wait for each other in it.
bool is_exchange(const BoundOp& op);

class Executor {
 public:
  // One of `ops` is `sample`.
  Executor(const Device& device, std::vector<BoundOp> ops, OpMark& mark, RankPlace place, RangeCalls ranges);

  // From now on the driver's code runs instead of the list: all but `run`. Throws GLM_UNSUPPORTED if it is not of this
  // plan.
  void attach(const Driver& driver, const std::string& plan, const Limits& limits);

  // The largest scratch that any op needs.
  size_t workspace_bytes() const;

  // Calls the ops before `sample` in order, or it and what comes after. Throws GLM_DEVICE_ERROR or GLM_INTERNAL with
  // the op's label at the first that fails.
  void run_forward(int32_t num_rows, int32_t num_samples);
  void run_sample(int32_t num_rows, int32_t num_samples);
  // Those of `ops`, which are places in the plan.
  void run(std::span<const int32_t> ops, int32_t num_rows, int32_t num_samples);
  // The ops in which ranks wait for each other, in order, of a step that samples rows or does not.
  std::vector<const BoundOp*> exchanges(bool samples) const;
  size_t num_exchanges(bool samples) const { return num_exchanges_[samples ? 1 : 0]; }
  int32_t num_ops() const { return static_cast<int32_t>(ops_.size()); }

 private:
  void run_op(BoundOp& op, int32_t num_rows, int32_t num_samples);
  void check(const BoundOp& op, glm_status status) const;
  template <class Args>
  glm_status call_own(Args args, int32_t num_rows);

  const Device* device_;
  std::vector<BoundOp> ops_;
  size_t sample_;            // its place
  size_t num_exchanges_[2];  // of a step that does not sample, and one that does
  OpMark* mark_;
  RankPlace place_;
  RangeCalls ranges_;
  std::unique_ptr<BoundDriver> driver_;  // NULL: the list itself runs
};

}  // namespace glm
