// What is asked of an engine beside steps: its experts' loads; when idle, its buffers, and ops one by one.
#include <algorithm>

#include "engine/engine.h"
#include "support/dtype.h"

namespace glm {

std::string Engine::device_place(uint64_t exchanges_begun, bool waits) const {
  return finished_ > collected_ ? exchange_log_.place(exchanges_begun, waits) : "";
}

void Engine::check_idle() const {
  throw_if_failed();
  if (collected_ != submitted_) fail(GLM_INVALID_ARGUMENT, "the engine is not idle: collect its steps first");
}

// All that an engine without steps in flight may still have to do.
void Engine::wait_for_bindings() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

const Buffer& Engine::find_buffer(const std::string& name, int32_t rows, size_t bytes) const {
  const auto found = resources_.state.buffers.find(name);
  if (found == resources_.state.buffers.end()) fail(GLM_INVALID_ARGUMENT, "no buffer is named '", name, "'");
  const Buffer& buffer = found->second;
  if (rows < 0 || rows > buffer.rows) {
    fail(GLM_INVALID_ARGUMENT, "buffer ", name, ": rows ", rows, ", expected 0 to ", buffer.rows);
  }
  const size_t size =
      static_cast<size_t>(rows) * static_cast<size_t>(buffer.tensor.cols) * element_bytes(buffer.tensor.dtype);
  if (bytes != size) {
    fail(GLM_INVALID_ARGUMENT, "buffer ", name, ": ", bytes, " bytes, expected ", size, ": ", rows, " rows of ",
         buffer.tensor.cols, " ", dtype_name(buffer.tensor.dtype));
  }
  return buffer;
}

void Engine::read_buffer(const std::string& name, int32_t rows, void* out, size_t bytes) {
  check_idle();
  const Buffer& buffer = find_buffer(name, rows, bytes);
  const std::lock_guard lock(stream_mutex_);
  device_->copy_out(out, buffer.tensor.data, bytes);
  device_->synchronize();
}

void Engine::write_buffer(const std::string& name, int32_t rows, const void* data, size_t bytes) {
  check_idle();
  const Buffer& buffer = find_buffer(name, rows, bytes);
  const std::lock_guard lock(stream_mutex_);
  device_->copy_in(buffer.tensor.data, data, bytes);
  device_->synchronize();
}

glm_step_result Engine::run_ops(const glm_step_batch& batch, std::span<const int32_t> ops, int32_t repeats) {
  check_idle();
  if (repeats < 1) fail(GLM_INVALID_ARGUMENT, "repeats ", repeats, ", expected at least 1");
  if (batch.num_masks != 0)
    fail(GLM_INVALID_ARGUMENT, "num_masks ", batch.num_masks, ", expected 0: masks are for steps");
  mirror_->accept(batch);
  Executor& executor = executors_[static_cast<size_t>(batch.plan)];
  for (const int32_t op : ops) {
    if (op < 0 || op >= executor.num_ops()) {
      fail(GLM_INVALID_ARGUMENT, "op ", op, ", expected 0 to ", executor.num_ops() - 1);
    }
  }
  // Not among the steps in flight, of which there are none.
  Staging& staging = staging_[submitted_ % staging_.size()];
  fill_staging(batch, *mirror_, batch.num_rows, limits_, staging);
  wait_for_bindings();
  const std::lock_guard lock(stream_mutex_);
  try {
    send_inputs(staging);
    set_counts(staging.block.step);
    const uint64_t device_ns = time_ops(executor, staging, ops, repeats);
    device_->copy_out(staging.block.results, device_block_.results, staging.block.result_bytes);
    device_->synchronize();
    return staging.result(device_ns);
  } catch (const Failure& failure) {
    note_failure(failure, submitted_);
    throw;
  }
}

void Engine::read_expert_loads(std::span<uint64_t> out) {
  throw_if_failed();
  const ExpertLoads& loads = resources_.state.expert_loads;
  if (out.size() != loads.size()) {
    fail(GLM_INVALID_ARGUMENT, "expert loads: room for ", out.size(), ", expected ", loads.size());
  }
  const std::lock_guard lock(stream_mutex_);
  device_->copy_out(out.data(), loads.data(), out.size_bytes());
  device_->synchronize();
}

uint64_t Engine::time_ops(Executor& executor, const Staging& staging, std::span<const int32_t> ops, int32_t repeats) {
  const int32_t rows = staging.block.step.num_rows;
  const int32_t samples = staging.block.step.num_samples;
  std::optional<Graph> graph;
  if (repeats > 1 && device_->has_graphs() && !ops.empty()) {
    graph.emplace(*device_);
    executor.run(ops, rows, samples);
    graph->finish();
  }
  uint64_t fastest = UINT64_MAX;
  for (int32_t i = 0; i < repeats; ++i) {
    staging.started.record();
    if (graph) {
      graph->launch();
    } else {
      executor.run(ops, rows, samples);
    }
    staging.finished.record();
    staging.finished.wait();
    fastest = std::min(fastest, staging.started.nanoseconds_until(staging.finished));
  }
  return fastest;
}

}  // namespace glm
