// What ops read and write besides weights: buffers, KV pages, rope tables, slots and step inputs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "memory/expert_loads.h"
#include "memory/filler.h"
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
  std::map<std::string, const int32_t*, std::less<>> places;  // of placements: expert -> place
  std::vector<glm_kv_layer> kv;
  glm_slots slots;
  glm_step_inputs step;
  ExpertLoads expert_loads;
};

// Everything but the memory of the KV pages, whose layers are NULL. No slot is bound and the step has no arrays.
State make_state(const Declarations& declarations, const Limits& limits, Arena& arena, Filler& filler);

// Bytes of one page in all layers.
size_t kv_page_bytes(const KvSpec& spec);
// Gives every layer of `kv` its pages.
void allocate_kv(std::vector<glm_kv_layer>& kv, const Limits& limits, Arena& arena);

}  // namespace glm
