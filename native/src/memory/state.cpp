#include "memory/state.h"

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
template <class Function>
const float* make_rope_table(const std::string& what, const RopeSpec& spec, const Limits& limits, Filler& filler,
                             Function function) {
  const int32_t pairs = spec.rotary_dim / 2;
  return filler.make<float>(what + spec.name, {limits.max_context, pairs}, [&](float* out) {
    for (int32_t i = 0; i < pairs; ++i) {
      const float exponent = static_cast<float>(2 * i) / static_cast<float>(spec.rotary_dim);
      const float inverse_frequency = 1.0f / std::pow(spec.theta, exponent);
      for (int32_t position = 0; position < limits.max_context; ++position) {
        out[int64_t{position} * pairs + i] = function(static_cast<float>(position) * inverse_frequency);
      }
    }
  });
}

Rope make_rope(const RopeSpec& spec, const Limits& limits, Filler& filler) {
  const auto cos = [](float angle) { return std::cos(angle); };
  const auto sin = [](float angle) { return std::sin(angle); };
  return Rope{spec.rotary_dim, make_rope_table("cosines of rope ", spec, limits, filler, cos),
              make_rope_table("sines of rope ", spec, limits, filler, sin)};
}

glm_slots make_slots(int32_t vocab, const Limits& limits, Arena& arena) {
  const int32_t slots = limits.all_slots();
  const int32_t pages = limits.max_pages();
  glm_slots out{.sampling = arena.allocate<glm_sampling>("sampling state of slots", {slots}),
                .last_token = arena.allocate<int32_t>("last tokens of slots", {slots}),
                .page_table = arena.allocate<int32_t>("page tables of slots", {slots, pages}),
                .counts = arena.allocate<uint16_t>("token counts of slots", {slots, vocab}),
                .max_slots = slots,
                .max_pages = pages,
                .vocab = vocab};
  const size_t num_slots = static_cast<size_t>(slots);
  arena.device().fill(out.last_token, 0, num_slots * sizeof(int32_t));
  arena.device().fill(out.page_table, 0xff, num_slots * static_cast<size_t>(pages) * sizeof(int32_t));  // -1: no page
  return out;
}

const int32_t* make_places(const PlacementSpec& spec, Filler& filler) {
  const auto count = static_cast<int64_t>(spec.experts.size());
  return filler.make<int32_t>("placement " + spec.name, {count}, [&](int32_t* out) {
    for (size_t place = 0; place < spec.experts.size(); ++place) out[spec.experts[place]] = static_cast<int32_t>(place);
  });
}

}  // namespace

State make_state(const Declarations& declarations, const Limits& limits, Arena& arena, Filler& filler) {
  State state{};
  if (const auto& kv = declarations.kv) {
    const glm_kv_layer layer{
        .k = nullptr, .v = nullptr, .dtype = kv->dtype, .kv_heads = kv->kv_heads, .head_dim = kv->head_dim};
    state.kv.assign(static_cast<size_t>(kv->layers), layer);
  }
  state.slots = make_slots(declarations.vocab, limits, arena);
  for (const BufferSpec& spec : declarations.buffers) {
    state.buffers.emplace(spec.name, make_buffer(spec, limits, arena));
  }
  for (const RopeSpec& spec : declarations.ropes) state.ropes.emplace(spec.name, make_rope(spec, limits, filler));
  for (const PlacementSpec& spec : declarations.placements) state.places.emplace(spec.name, make_places(spec, filler));
  return state;
}

size_t kv_page_bytes(const KvSpec& spec) {
  return Arena::byte_count("a KV page", 2 * element_bytes(spec.dtype),
                           {spec.layers, spec.kv_heads, GLM_PAGE_SIZE, spec.head_dim});
}

void allocate_kv(std::vector<glm_kv_layer>& kv, const Limits& limits, Arena& arena) {
  for (size_t i = 0; i < kv.size(); ++i) {
    glm_kv_layer& layer = kv[i];
    const std::string what = "KV pages of layer " + std::to_string(i);
    const size_t bytes = Arena::byte_count(what, element_bytes(layer.dtype),
                                           {limits.all_pages(), layer.kv_heads, GLM_PAGE_SIZE, layer.head_dim});
    layer.k = arena.allocate_bytes(what, bytes);
    layer.v = arena.allocate_bytes(what, bytes);
  }
}

}  // namespace glm
