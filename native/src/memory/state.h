// What ops read and write besides weights: buffers, KV pages, rope tables, slots and step inputs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "memory/limits.h"
#include "plan/plan.h"

namespace glm {

struct Buffer {
  glm_tensor tensor;
  int64_t rows;  // allocated
};

struct Rope {
  int32_t rotary_dim;
  const float* cos;  // [max_context][rotary_dim / 2]
  const float* sin;
};

struct State {
  std::map<std::string, Buffer, std::less<>> buffers;
  std::map<std::string, Rope, std::less<>> ropes;
  std::vector<glm_kv_layer> kv;
  glm_slots slots;
  glm_step_inputs step;
};

// `kv_arena` takes the KV pages, `arena` all else. No slot is bound and the step is empty.
State make_state(const Declarations& declarations, const Limits& limits, Arena& arena, Arena& kv_arena);

// The arrays of a step for its largest size; counts are 0.
glm_step_inputs make_step_inputs(const Limits& limits, Arena& arena, const std::string& what);

}  // namespace glm
