#include "plan/op_form.h"

#include <array>

namespace glm {
namespace {

const std::array<OpForm, GLM_OP_COUNT>& forms() {
  static const std::array<OpForm, GLM_OP_COUNT> table = {{
      {"embed", {"table", "out"}, {}},
      {"rms_norm", {"residual", "weight", "eps"}, {"delta", "reduce", "out", "q", "scale", "rows"}},
      {"quantize", {"x", "q", "scale"}, {}},
      {"linear", {"x", "w", "out"}, {"x_scale", "rows"}},
      {"qk_norm_rope_store", {"qkv", "heads", "rope", "layer", "out"}, {"q_norm", "k_norm", "eps"}},
      {"paged_attention", {"q", "heads", "softmax_scale", "layer", "out"}, {}},
      {"silu_mul", {"x"}, {"out", "q", "scale"}},
      {"moe_route",
       {"x", "w", "top_k", "groups", "topk_groups", "normalize", "scale", "ids", "weights"},
       {"bias", "placement"}},
      {"moe_group", {"ids", "top_k", "first", "count", "offsets", "order"}, {}},
      {"moe_gate_up", {"x", "gate", "up", "top_k", "offsets", "order"}, {"x_scale", "out", "q", "scale"}},
      {"moe_down", {"x", "down", "top_k", "offsets", "order", "ids", "weights", "out"}, {"x_scale", "base"}},
      {"all_reduce", {"x"}, {}},
      {"gather_rows", {"x", "out"}, {}},
      {"sample", {"logits"}, {"first"}},
  }};
  return table;
}

}  // namespace

const OpForm& op_form(glm_op kind) {
  return forms()[kind];
}

std::optional<glm_op> find_op(std::string_view name) {
  for (size_t i = 0; i < forms().size(); ++i) {
    if (forms()[i].name == name) return static_cast<glm_op>(i);
  }
  return std::nullopt;
}

}  // namespace glm
