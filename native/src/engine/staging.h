// What travels between the caller's thread and the engine's: steps and slot bindings, copied.
#pragma once

#include <cstdint>
#include <vector>

#include "glm/runtime.h"
#include "memory/arena.h"
#include "memory/limits.h"

namespace glm {

// One submitted step and, once it has run, its results.
struct Staging {
  glm_step_inputs inputs;
  std::vector<glm_page_update> page_updates;
  uint64_t device_ns = 0;

  bool decode() const { return inputs.num_rows == inputs.num_seqs && inputs.num_rows == inputs.num_samples; }
};

struct SlotBinding {
  int32_t slot;
  glm_sampling sampling;
  std::vector<int32_t> prompt;
  std::vector<int32_t> sampled;
};

Staging make_staging(const Limits& limits, Arena& arena);

// `batch` has been checked.
void fill_staging(const glm_step_batch& batch, Staging& staging);

// Into the fixed place that ops read, and back out of it.
void copy_inputs(const glm_step_inputs& from, glm_step_inputs& to);
void copy_outputs(const glm_step_inputs& from, glm_step_inputs& to);

void apply_page_updates(const std::vector<glm_page_update>& updates, const glm_slots& slots);
void apply_binding(const SlotBinding& binding, const glm_slots& slots);

}  // namespace glm
