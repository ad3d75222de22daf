// From op lines to args structs: everything that kernels.h asks of arguments is checked here, once.
#pragma once

#include <string>
#include <vector>

#include "exec/op_reader.h"
#include "exec/ops.h"

namespace glm {

struct BoundOp {
  std::string label;
  OpRows rows;
  OpArgs args;  // rows is the largest until a step sets it; with kOwn the first row is the step's
};

// Throws GLM_INVALID_ARGUMENT with line, op, label and argument.
std::vector<BoundOp> bind_plan(const Plan& plan, const Resources& resources);

}  // namespace glm
