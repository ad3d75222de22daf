// One function an op: reads its line into its args struct. Aliases are checked by the caller.
#pragma once

#include <tuple>

#include "exec/op_reader.h"
#include "exec/ops.h"

namespace glm {

#define GLM_BIND(enumerator, field) OpArgs bind_##field(OpReader& op);
GLM_FOR_EACH_OP(GLM_BIND)
#undef GLM_BIND

using TensorPair = std::tuple<glm_tensor, glm_tensor>;

// x and x_scale of a product with weights of `format` and `cols` input channels.
TensorPair read_linear_input(OpReader& op, glm_weight_format format, int32_t cols, int32_t rows_each);

// q and scale: both or neither.
TensorPair write_quantized(OpReader& op, int32_t cols, int32_t rows_each);

// At least one of them.
void require_output(const OpReader& op, const glm_tensor& out, const glm_tensor& q);

}  // namespace glm
