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
      {"silu_mul", {"x"}, {"out", "q", "scale", "rows"}},
      {"moe_route",
       {"x", "w", "top_k", "groups", "topk_groups", "normalize", "scale", "ids", "weights"},
       {"bias", "placement", "rows"}},
      {"moe_group", {"ids", "top_k", "first", "count", "offsets", "order"}, {}},
      {"moe_gate_up", {"x", "gate", "up", "top_k", "offsets", "order"}, {"x_scale", "out", "q", "scale"}},
      {"moe_down", {"x", "down", "top_k", "offsets", "order", "ids", "weights", "out"}, {"x_scale", "base"}},
      {"all_reduce", {"x"}, {}},
      {"gather_rows", {"x", "out"}, {}},
      {"sample", {"logits"}, {"first"}},
      {"reduce_scatter", {"x"}, {}},
      {"all_gather", {"x"}, {}},
      {"moe_dispatch", {"ids", "x", "top_k", "first", "count"}, {"x_scale"}},
      {"moe_down_each", {"x", "down", "top_k", "offsets", "order", "out"}, {"x_scale"}},
      {"moe_combine", {"ids", "weights", "products", "top_k", "count", "out"}, {"base"}},
  }};
  return table;
}

}  // namespace

const OpForm& op_form(glm_op kind) {
  return forms()[kind];
}

bool is_exchange(glm_op kind) {
  switch (kind) {
    case GLM_OP_ALL_REDUCE:
    case GLM_OP_REDUCE_SCATTER:
    case GLM_OP_ALL_GATHER:
    case GLM_OP_MOE_DISPATCH:
    case GLM_OP_MOE_COMBINE:
      return true;
    default:
      return false;
  }
}

std::optional<glm_op> find_op(std::string_view name) {
  for (size_t i = 0; i < forms().size(); ++i) {
    if (forms()[i].name == name) return static_cast<glm_op>(i);
  }
  return std::nullopt;
}

}  // namespace glm
