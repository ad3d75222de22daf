#include "memory/state.h"

#include <algorithm>
#include <cmath>

#include "support/dtype.h"

namespace glm {
namespace {

Buffer make_buffer(const BufferSpec& spec, const Limits& limits, Arena& arena) {
  const int64_t rows = limits.rows_of(spec.rows);
  const std::string what = "buffer " + spec.name;
  const size_t bytes = Arena::byte_count(what, element_bytes(spec.dtype), {rows, spec.cols});
  return {{.data = arena.allocate_bytes(what, bytes), .dtype = spec.dtype, .cols = spec.cols, .stride = spec.cols},
          rows};
}

// As transformers computes it (modeling_rope_utils, default): every step in f32, the exponent divided before the power.
Rope make_rope(const RopeSpec& spec, const Limits& limits, Arena& arena) {
  const int32_t pairs = spec.rotary_dim / 2;
  float* cos = arena.allocate<float>("cosines of rope " + spec.name, {limits.max_context, pairs});
  float* sin = arena.allocate<float>("sines of rope " + spec.name, {limits.max_context, pairs});
  for (int32_t i = 0; i < pairs; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(spec.rotary_dim);
    const float inverse_frequency = 1.0f / std::pow(spec.theta, exponent);
    for (int32_t position = 0; position < limits.max_context; ++position) {
      const float angle = static_cast<float>(position) * inverse_frequency;
      const int64_t at = int64_t{position} * pairs + i;
      cos[at] = std::cos(angle);
      sin[at] = std::sin(angle);
    }
  }
  return Rope{spec.rotary_dim, cos, sin};
}

std::vector<glm_kv_layer> make_kv(const KvSpec& spec, const Limits& limits, Arena& arena) {
  std::vector<glm_kv_layer> layers;
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    const std::string what = "KV pages of layer " + std::to_string(layer);
    const size_t bytes = Arena::byte_count(what, element_bytes(spec.dtype),
                                           {limits.num_pages, spec.kv_heads, GLM_PAGE_SIZE, spec.head_dim});
    layers.push_back({.k = arena.allocate_bytes(what, bytes),
                      .v = arena.allocate_bytes(what, bytes),
                      .dtype = spec.dtype,
                      .kv_heads = spec.kv_heads,
                      .head_dim = spec.head_dim});
  }
  return layers;
}

glm_slots make_slots(int32_t vocab, const Limits& limits, Arena& arena) {
  const int32_t slots = limits.max_slots;
  const int32_t pages = limits.max_pages();
  glm_slots out{.sampling = arena.allocate<glm_sampling>("sampling state of slots", {slots}),
                .last_token = arena.allocate<int32_t>("last tokens of slots", {slots}),
                .page_table = arena.allocate<int32_t>("page tables of slots", {slots, pages}),
                .counts = arena.allocate<uint16_t>("token counts of slots", {slots, vocab}),
                .max_slots = slots,
                .max_pages = pages,
                .vocab = vocab};
  std::fill_n(out.last_token, slots, 0);
  std::fill_n(out.page_table, int64_t{slots} * pages, -1);
  return out;
}

}  // namespace

glm_step_inputs make_step_inputs(const Limits& limits, Arena& arena, const std::string& what) {
  const int64_t rows = limits.max_rows;
  const int64_t samples = limits.max_samples;
  return glm_step_inputs{.num_rows = 0,
                         .num_seqs = 0,
                         .num_samples = 0,
                         .token_ids = arena.allocate<int32_t>(what, {rows}),
                         .positions = arena.allocate<int32_t>(what, {rows}),
                         .row_slots = arena.allocate<int32_t>(what, {rows}),
                         .seq_slots = arena.allocate<int32_t>(what, {samples}),
                         .seq_starts = arena.allocate<int32_t>(what, {samples + 1}),
                         .sample_rows = arena.allocate<int32_t>(what, {samples}),
                         .sample_slots = arena.allocate<int32_t>(what, {samples}),
                         .out_token_ids = arena.allocate<int32_t>(what, {samples}),
                         .out_logprobs = arena.allocate<float>(what, {samples}),
                         .out_top_ids = arena.allocate<int32_t>(what, {samples, GLM_MAX_LOGPROBS}),
                         .out_top_logprobs = arena.allocate<float>(what, {samples, GLM_MAX_LOGPROBS})};
}

State make_state(const Declarations& declarations, const Limits& limits, Arena& arena, Arena& kv_arena) {
  State state{};
  if (declarations.kv) state.kv = make_kv(*declarations.kv, limits, kv_arena);
  state.slots = make_slots(declarations.vocab, limits, arena);
  state.step = make_step_inputs(limits, arena, "step inputs");
  for (const BufferSpec& spec : declarations.buffers) {
    state.buffers.emplace(spec.name, make_buffer(spec, limits, arena));
  }
  for (const RopeSpec& spec : declarations.ropes) state.ropes.emplace(spec.name, make_rope(spec, limits, arena));
  return state;
}

}  // namespace glm
