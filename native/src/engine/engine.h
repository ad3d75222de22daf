// One rank's engine. The caller's thread checks and queues; the engine's own thread runs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/bindings.h"
#include "engine/decode_graphs.h"
#include "engine/exchange_log.h"
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
  // Told of what makes every later call fail; from any thread, perhaps more than once.
  using OnFailure = std::function<void(const Failure&)>;

  // Opens the rank's device. Then, in this order: `load`, `take_pages`, `start`, `wait_ready`.
  Engine(const glm_engine_options& options, int32_t rank, OnFailure on_failure);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Device& device() const { return *device_; }
  const Plan& plan(glm_plan_kind kind) const { return kind == GLM_PLAN_MIXED ? mixed_ : decode_; }

  // Weights and whatever else steps need, but for the KV pages. `tensors` outlives the engine.
  void load(const glm_engine_options& options, TensorTable& tensors, const ScanProgress& progress);
  // KV pages that memory has room for, at most those asked for. Throws if there is not one and `fit`.
  int32_t fitting_pages(bool fit) const;
  // The last memory that it takes: no rank allocates once another may wait on its device for it.
  void take_pages(const glm_engine_options& options, int32_t num_pages);
  // Begins to run; ranks that record graphs do so together, each on its own thread.
  void start();
  void wait_ready();
  // Waits for steps in flight. Idempotent.
  void stop();
  // From any thread: `collect` waits no longer for steps that may never end.
  void give_up(const Failure& failure);

  // Where the engine's thread is, for other threads.
  const OpMark& mark() const { return mark_; }
  // Where the device is in the steps that it has been given, once it has begun so many exchanges; empty between steps.
  std::string device_place(uint64_t exchanges_begun, bool waits) const;
  uint64_t steps_handed_over() const { return finished_; }

  glm_engine_info info() const;
  void bind_slot(int32_t slot, const glm_sampling& sampling, const int32_t* prompt, int32_t num_prompt,
                 const int32_t* sampled, int32_t num_sampled);
  void release_slot(int32_t slot);
  void submit(const glm_step_batch& batch);
  void set_masks(const uint32_t* masks);
  glm_step_result collect();
  // Of each moe_group, in order of the mixed plan, its experts' counters. Waits for steps in flight.
  void read_expert_loads(std::span<uint64_t> out);
  void read_buffer(const std::string& name, int32_t rows, void* out, size_t bytes);
  void write_buffer(const std::string& name, int32_t rows, const void* data, size_t bytes);
  glm_step_result run_ops(const glm_step_batch& batch, std::span<const int32_t> ops, int32_t repeats);

 private:
  // A step, or, with `binding`, a slot that is bound.
  struct Command {
    std::unique_ptr<SlotBinding> binding;
    Staging* step;
  };

  void allocate_steps();
  void allocate_workspace();
  void bind_plans();
  void record_decode();

  void throw_if_failed() const;
  void note_failure(const Failure& failure, uint64_t step);
  void set_failed(const Failure& failure);
  void push(Command command);
  void run();
  void run_command(const Command& command);
  void run_step(Staging& step);
  void send_inputs(const Staging& step);
  void run_forward(const Staging& step);
  bool wait_for_masks();
  void set_counts(const glm_step_inputs& from);

  void check_idle() const;
  void wait_for_bindings();
  const Buffer& find_buffer(const std::string& name, int32_t rows, size_t bytes) const;
  uint64_t time_ops(Executor& executor, const Staging& staging, std::span<const int32_t> ops, int32_t repeats);

  // In order of construction: what is later may point into what is earlier.
  OnFailure on_failure_;
  RankPlace place_;
  Limits limits_;
  Plan mixed_;
  Plan decode_;
  Declarations declarations_;
  std::optional<KernelTable> table_;
  std::optional<Device> device_;
  std::optional<Driver> driver_;  // none: the built-in executor
  std::optional<Arena> weight_arena_;
  std::optional<Arena> kv_arena_;
  std::optional<Arena> scratch_arena_;
  std::optional<Arena> host_arena_;
  Resources resources_;
  OpMark mark_;
  std::vector<Executor> executors_;  // by glm_plan_kind
  ExchangeLog exchange_log_;
  StepBlock device_block_{};
  // One more than in flight: the result that the caller still reads stays as it is.
  std::vector<Staging> staging_;
  std::optional<SlotBinder> slot_binder_;
  std::optional<DecodeGraphs> graphs_;  // where the table has graphs
  std::optional<SlotMirror> mirror_;

  // The caller's thread only.
  uint64_t submitted_ = 0;
  std::atomic<uint64_t> collected_ = 0;  // read by other threads too
  std::deque<const Staging*> held_;      // steps without their masks, in order
  bool lost_ = false;                    // the device failed in a step that it had been given whole

  std::mutex stream_mutex_;             // the device's stream takes calls of one thread at a time
  std::atomic<uint64_t> finished_ = 0;  // steps of which the device has all
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Command> queue_;      // guarded by mutex_
  bool busy_ = false;              // guarded by mutex_: a command runs
  uint64_t ended_ = 0;             // guarded by mutex_: steps handed to the device or given up
  std::optional<Failure> failed_;  // guarded by mutex_; set once
  bool stop_ = false;              // guarded by mutex_
  bool ready_ = false;             // guarded by mutex_: steps may run
  int32_t masked_ = 0;             // guarded by mutex_: held steps whose masks are there and not used
  bool given_up_ = false;          // guarded by mutex_
  std::thread thread_;             // last: everything else exists while it runs
};

}  // namespace glm
