// The engine: what a glm_engine is. The caller's thread checks and queues; the engine's own thread runs.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/slots.h"
#include "engine/staging.h"
#include "exec/executor.h"
#include "exec/kernel_table.h"
#include "glm/runtime.h"
#include "memory/arena.h"
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

 private:
  // A step, or, with `binding`, a slot that is bound.
  struct Command {
    std::unique_ptr<SlotBinding> binding;
    Staging* step;
  };

  void allocate_and_load(const glm_engine_options& options, const Declarations& declarations);
  void make_executors(const Plan& mixed, const Plan& decode);
  void throw_if_failed() const;
  void push(Command command);
  void run();
  void run_step(Staging& step);

  // In order of construction: what is later may point into what is earlier.
  Limits limits_;
  std::optional<KernelTable> table_;
  Arena weight_arena_;
  Arena kv_arena_;
  Arena scratch_arena_;
  std::unique_ptr<TensorTable> tensors_;
  Resources resources_;
  std::vector<Executor> executors_;  // mixed, decode
  // One more than in flight: the result that the caller still reads stays as it is.
  std::array<Staging, GLM_MAX_IN_FLIGHT + 1> staging_;
  std::optional<SlotMirror> mirror_;

  // The caller's thread only.
  uint64_t submitted_ = 0;
  uint64_t collected_ = 0;

  std::atomic<uint64_t> finished_ = 0;  // steps that ran to their end
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Command> queue_;      // guarded by mutex_
  uint64_t ended_ = 0;             // guarded by mutex_: steps that ran or were given up
  std::optional<Failure> failed_;  // guarded by mutex_; set once
  bool stop_ = false;              // guarded by mutex_
  std::thread thread_;             // last: everything else exists while it runs
};

}  // namespace glm
