// The engine: what a glm_engine is. The caller's thread checks and queues; the engine's own thread runs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/bindings.h"
#include "engine/decode_graphs.h"
#include "engine/slots.h"
#include "engine/staging.h"
#include "engine/step_block.h"
#include "exec/executor.h"
#include "exec/kernel_table.h"
#include "glm/runtime.h"
#include "memory/arena.h"
#include "memory/device.h"
#include "support/error.h"

namespace glm {

class Engine {
 public:
  explicit Engine(const glm_engine_options& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  glm_engine_info info() const;
  void bind_slot(int32_t slot, const glm_sampling& sampling, const int32_t* prompt, int32_t num_prompt,
                 const int32_t* sampled, int32_t num_sampled);
  void release_slot(int32_t slot);
  void submit(const glm_step_batch& batch);
  glm_step_result collect();
  void read_buffer(const std::string& name, int32_t rows, void* out, size_t bytes);
  void write_buffer(const std::string& name, int32_t rows, const void* data, size_t bytes);
  glm_step_result run_ops(const glm_step_batch& batch, std::span<const int32_t> ops, int32_t repeats);

 private:
  // A step, or, with `binding`, a slot that is bound.
  struct Command {
    std::unique_ptr<SlotBinding> binding;
    Staging* step;
  };

  void load(const glm_engine_options& options, const Declarations& declarations);
  void bind_plans(const Plan& mixed, const Plan& decode);
  void allocate_steps();
  void allocate_kv_pages(const KvSpec& kv, bool fit);
  void record_decode();

  void throw_if_failed() const;
  void note_failure(const Failure& failure, uint64_t step);
  void push(Command command);
  void run();
  void run_command(const Command& command);
  void run_step(Staging& step);
  void send_inputs(const Staging& step);
  void run_plan(const Staging& step);
  void set_counts(const glm_step_inputs& from);

  void check_idle() const;
  const Buffer& find_buffer(const std::string& name, int32_t rows, size_t bytes) const;
  uint64_t time_ops(Executor& executor, const Staging& staging, std::span<const int32_t> ops, int32_t repeats);

  // In order of construction: what is later may point into what is earlier.
  Limits limits_;
  std::optional<KernelTable> table_;
  std::optional<Device> device_;
  std::optional<Arena> weight_arena_;
  std::optional<Arena> kv_arena_;
  std::optional<Arena> scratch_arena_;
  std::optional<Arena> host_arena_;
  std::unique_ptr<TensorTable> tensors_;
  Resources resources_;
  std::vector<Executor> executors_;  // by glm_plan_kind
  StepBlock device_block_{};
  // One more than in flight: the result that the caller still reads stays as it is.
  std::vector<Staging> staging_;
  std::optional<SlotBinder> slot_binder_;
  std::optional<DecodeGraphs> graphs_;  // where the table has graphs
  std::optional<SlotMirror> mirror_;

  // The caller's thread only.
  uint64_t submitted_ = 0;
  uint64_t collected_ = 0;
  bool lost_ = false;  // the device failed in a step that it had been given whole

  std::mutex stream_mutex_;             // the device's stream takes calls of one thread at a time
  std::atomic<uint64_t> finished_ = 0;  // steps of which the device has all
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Command> queue_;      // guarded by mutex_
  uint64_t ended_ = 0;             // guarded by mutex_: steps handed to the device or given up
  std::optional<Failure> failed_;  // guarded by mutex_; set once
  bool stop_ = false;              // guarded by mutex_
  std::thread thread_;             // last: everything else exists while it runs
};

}  // namespace glm
