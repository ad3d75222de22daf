// The ops of the kernel table as a typed list: X(enumerator, field) for each, in glm_op's order.
#pragma once

#include <cstddef>
#include <type_traits>
#include <variant>

#include "glm/kernels.h"

#define GLM_FOR_EACH_OP(X)                  \
  X(EMBED, embed)                           \
  X(RMS_NORM, rms_norm)                     \
  X(QUANTIZE, quantize)                     \
  X(LINEAR, linear)                         \
  X(QK_NORM_ROPE_STORE, qk_norm_rope_store) \
  X(PAGED_ATTENTION, paged_attention)       \
  X(SILU_MUL, silu_mul)                     \
  X(MOE_ROUTE, moe_route)                   \
  X(MOE_GROUP, moe_group)                   \
  X(MOE_GATE_UP, moe_gate_up)               \
  X(MOE_DOWN, moe_down)                     \
  X(ALL_REDUCE, all_reduce)                 \
  X(GATHER_ROWS, gather_rows)               \
  X(SAMPLE, sample)                         \
  X(REDUCE_SCATTER, reduce_scatter)         \
  X(ALL_GATHER, all_gather)                 \
  X(MOE_DISPATCH, moe_dispatch)             \
  X(MOE_DOWN_EACH, moe_down_each)           \
  X(MOE_COMBINE, moe_combine)

namespace glm {

// The alternative's index is the glm_op.
#define GLM_ARGS_TYPE(enumerator, field) , glm_##field##_args
template <class, class... Args>
using ArgsVariant = std::variant<Args...>;
using OpArgs = ArgsVariant<void GLM_FOR_EACH_OP(GLM_ARGS_TYPE)>;
#undef GLM_ARGS_TYPE
static_assert(std::variant_size_v<OpArgs> == GLM_OP_COUNT);
#define GLM_ARGS_INDEX(enumerator, field) \
  static_assert(std::is_same_v<std::variant_alternative_t<GLM_OP_##enumerator, OpArgs>, glm_##field##_args>);
GLM_FOR_EACH_OP(GLM_ARGS_INDEX)
#undef GLM_ARGS_INDEX

#define GLM_CALL(enumerator, field)                                                                           \
  inline glm_status call_op(const glm_kernels& kernels, glm_device* device, const glm_##field##_args& args) { \
    return kernels.field(device, &args);                                                                      \
  }
GLM_FOR_EACH_OP(GLM_CALL)
#undef GLM_CALL

inline bool has_op(const glm_kernels& kernels, glm_op op) {
#define GLM_HAS(enumerator, field) \
  if (op == GLM_OP_##enumerator) return kernels.field != nullptr;
  GLM_FOR_EACH_OP(GLM_HAS)
#undef GLM_HAS
  return false;
}

}  // namespace glm
