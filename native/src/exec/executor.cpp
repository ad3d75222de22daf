#include "exec/executor.h"

#include <algorithm>

#include "plan/op_form.h"
#include "support/error.h"

namespace glm {

const char* status_name(glm_status status) {
  switch (status) {
    case GLM_OK:
      return "GLM_OK";
    case GLM_INVALID_ARGUMENT:
      return "GLM_INVALID_ARGUMENT";
    case GLM_UNSUPPORTED:
      return "GLM_UNSUPPORTED";
    case GLM_BAD_CHECKPOINT:
      return "GLM_BAD_CHECKPOINT";
    case GLM_OUT_OF_MEMORY:
      return "GLM_OUT_OF_MEMORY";
    case GLM_DEVICE_ERROR:
      return "GLM_DEVICE_ERROR";
    case GLM_INTERNAL:
      return "GLM_INTERNAL";
  }
  return "an unknown status";
}

std::string describe(const BoundOp& op) {
  return text("op ", op_form(static_cast<glm_op>(op.args.index())).name, " ", op.label);
}

bool is_exchange(const BoundOp& op) {
  if (const auto* norm = std::get_if<glm_rms_norm_args>(&op.args)) return norm->reduce != 0;
  return is_exchange(static_cast<glm_op>(op.args.index())) || op.args.index() == GLM_OP_SAMPLE;
}

Executor::Executor(const Device& device, std::vector<BoundOp> ops, OpMark& mark, RankPlace place, RangeCalls ranges)
    : device_(&device), ops_(std::move(ops)), mark_(&mark), place_(place), ranges_(ranges) {
  const auto is_sample = [](const BoundOp& op) { return op.args.index() == GLM_OP_SAMPLE; };
  sample_ = static_cast<size_t>(std::ranges::find_if(ops_, is_sample) - ops_.begin());
  for (const bool samples : {false, true}) num_exchanges_[samples ? 1 : 0] = exchanges(samples).size();
}

size_t Executor::workspace_bytes() const {
  size_t bytes = 0;
  for (const BoundOp& op : ops_) {
    const auto needed = [&](const auto& args) {
      return device_->kernels().workspace_bytes(device_->handle(), static_cast<glm_op>(op.args.index()), &args);
    };
    bytes = std::max(bytes, std::visit(needed, op.args));
  }
  return bytes;
}

std::vector<const BoundOp*> Executor::exchanges(bool samples) const {
  std::vector<const BoundOp*> found;
  for (const BoundOp& op : ops_) {
    if (is_exchange(op) && (samples || op.rows != OpRows::kSamples)) found.push_back(&op);
  }
  return found;
}

void Executor::attach(const Driver& driver, const std::string& plan, const Limits& limits) {
  auto& mark = reinterpret_cast<glm_driver_mark&>(*mark_);
  driver_ = std::make_unique<BoundDriver>(driver, plan, *device_, ops_, mark, place_, limits);
}

void Executor::run_forward(int32_t num_rows, int32_t num_samples) {
  if (driver_) {
    const glm_status status = driver_->run_forward(num_rows, num_samples);
    if (status != GLM_OK) check(*mark_->op, status);
    return;
  }
  for (BoundOp& op : std::span(ops_).first(sample_)) run_op(op, num_rows, num_samples);
}

void Executor::run_sample(int32_t num_rows, int32_t num_samples) {
  if (driver_) {
    const glm_status status = driver_->run_sample(num_rows, num_samples);
    if (status != GLM_OK) check(*mark_->op, status);
    return;
  }
  for (BoundOp& op : std::span(ops_).subspan(sample_)) run_op(op, num_rows, num_samples);
}

void Executor::run(std::span<const int32_t> ops, int32_t num_rows, int32_t num_samples) {
  for (const int32_t op : ops) run_op(ops_[static_cast<size_t>(op)], num_rows, num_samples);
}

template <class Args>
glm_status Executor::call_own(Args args, int32_t num_rows) {
  skip_rows(args, place_.first_row(num_rows));
  args.rows = place_.end_row(num_rows) - place_.first_row(num_rows);
  return call_op(device_->kernels(), device_->handle(), args);
}

inline void Executor::run_op(BoundOp& op, int32_t num_rows, int32_t num_samples) {
  mark_->op.store(&op, std::memory_order_relaxed);
  mark_->calls.store(mark_->calls.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  const OpRange range(ranges_, op.label);
  const auto call = [&]<class Args>(Args& args) {
    if constexpr (TakesOwnRows<Args>) {
      if (op.rows == OpRows::kOwn) return call_own(args, num_rows);
    }
    args.rows = op.rows == OpRows::kSamples ? num_samples : num_rows;
    return call_op(device_->kernels(), device_->handle(), args);
  };
  check(op, std::visit(call, op.args));
}

void Executor::check(const BoundOp& op, glm_status status) const {
  if (status == GLM_OK) [[likely]]
    return;
  // What was checked when the plan was bound cannot be wrong now, so any other status is a contradiction.
  fail(status == GLM_DEVICE_ERROR ? GLM_DEVICE_ERROR : GLM_INTERNAL, describe(op), " of kernel table ",
       device_->kernels().name, " returned ", status_name(status), device_->last_error());
}

}  // namespace glm
