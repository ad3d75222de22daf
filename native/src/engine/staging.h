// What travels between the caller's thread, the engine's and the device: steps and slot bindings, copied.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/slots.h"
#include "engine/step_block.h"
#include "glm/runtime.h"
#include "memory/arena.h"
#include "memory/device.h"
#include "memory/limits.h"

namespace glm {

// One submitted step and, once `finished` has passed, its results.
struct Staging {
  Staging(const Device& device, const Limits& limits, int32_t vocab, Arena& host_arena)
      : block(make_step_block(limits, vocab, host_arena)), started(device), finished(device) {}

  glm_step_result result(uint64_t device_ns) const;

  StepBlock block;
  int32_t num_page_updates = 0;
  glm_plan_kind plan = GLM_PLAN_MIXED;
  int32_t num_samples = 0;  // of the caller: the block may hold padding beyond them
  int32_t num_masks = 0;
  Event started;
  Event finished;
};

// `batch` has been accepted by `mirror`. A decode step is filled up to `padded_rows` rows with rows of padding.
void fill_staging(const glm_step_batch& batch, const SlotMirror& mirror, int32_t padded_rows, const Limits& limits,
                  Staging& staging);

// Rows [first, end) of a decode step become padding: token 0 at position 0 of the spare slot, one sequence each.
void pad_decode(int32_t first, int32_t end, const Limits& limits, glm_step_inputs& step);

}  // namespace glm
