#include "exec/binder.h"

#include "exec/bind_op.h"

namespace glm {
namespace {

OpArgs bind_op(glm_op kind, OpReader& op) {
#define GLM_BIND_KIND(enumerator, field) \
  if (kind == GLM_OP_##enumerator) return bind_##field(op);
  GLM_FOR_EACH_OP(GLM_BIND_KIND)
#undef GLM_BIND_KIND
  fail(GLM_INTERNAL, "op kind ", kind, " has no binder");
}

}  // namespace

std::vector<BoundOp> bind_plan(const Plan& plan, const Resources& resources) {
  std::vector<BoundOp> ops;
  ops.reserve(plan.ops.size());
  for (const OpSpec& spec : plan.ops) {
    OpReader reader(resources, plan, spec);
    OpArgs args = bind_op(spec.kind, reader);
    if (spec.kind == GLM_OP_MOE_DOWN) {
      reader.check_aliases("out", "base");
    } else {
      reader.check_aliases();
    }
    std::visit([&](auto& typed) { typed.rows = reader.max_rows(); }, args);
    ops.push_back({spec.label, reader.by_samples(), args});
  }
  return ops;
}

}  // namespace glm
