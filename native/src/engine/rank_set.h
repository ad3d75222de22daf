// What a glm_engine is: an engine for each rank, all of which take the same steps.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "exec/rank_group.h"
#include "glm/runtime.h"
#include "support/error.h"
#include "weights/tensor_table.h"

namespace glm {

// Calls as those of runtime.h. The first rank that fails ends all of them: those that wait for it are woken.
class RankSet {
 public:
  explicit RankSet(const glm_engine_options& options);
  ~RankSet();
  RankSet(const RankSet&) = delete;
  RankSet& operator=(const RankSet&) = delete;

  glm_engine_info info() const;
  void bind_slot(int32_t slot, const glm_sampling& sampling, const int32_t* prompt, int32_t num_prompt,
                 const int32_t* sampled, int32_t num_sampled);
  void release_slot(int32_t slot);
  void submit(const glm_step_batch& batch);
  void set_masks(const uint32_t* masks);
  glm_step_result collect();

  // From any thread, beside any call.
  glm_engine_progress progress() const;
  void abort(const std::string& reason);

  // Of an idle engine.
  Engine& rank(int32_t rank);
  glm_step_result run_ops(const glm_step_batch& batch, std::span<const int32_t> ops, int32_t repeats);

 private:
  void check_plans() const;
  void create_group();
  void load(const glm_engine_options& options);
  void stop();
  void note_failure(size_t rank, const Failure& failure);
  // As it is told: with the rank, if there are several.
  Failure of_rank(size_t rank, const Failure& failure) const;
  Failure with_places(const Failure& failure) const;
  void throw_if_failed() const;
  // Calls `call(engine)` for each rank; a failure that ends the engine is told as the first one that happened.
  template <class Call>
  void each(Call call);
  // The same on a thread for each rank, at once; then the lowest rank's failure is told.
  template <class Call>
  void at_once(Call call);

  TensorTable tensors_;
  mutable std::mutex mutex_;
  std::optional<Failure> failed_;                 // guarded by mutex_; set once
  std::vector<std::unique_ptr<Engine>> engines_;  // by rank
  RankGroup group_;                               // of the engines' devices
};

}  // namespace glm
