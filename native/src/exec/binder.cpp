#include "exec/binder.h"

#include <map>

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

// offsets and order are indices into other arrays: who reads them must agree with the moe_group that wrote them last.
class Groupings {
 public:
  void note(const OpReader& op, const OpArgs& args) {
    if (const auto* group = std::get_if<glm_moe_group_args>(&args)) written_[group->offsets] = *group;
    if (const auto* gate_up = std::get_if<glm_moe_gate_up_args>(&args)) check(op, *gate_up, gate_up->gate);
    if (const auto* down = std::get_if<glm_moe_down_args>(&args)) check(op, *down, down->down);
    if (const auto* each = std::get_if<glm_moe_down_each_args>(&args)) check(op, *each, each->down);
  }

 private:
  template <class Args>
  void check(const OpReader& op, const Args& args, const glm_expert_weights& experts) const {
    const auto found = written_.find(args.offsets);
    if (found == written_.end()) op.error("offsets", "no moe_group before it writes this buffer");
    const glm_moe_group_args& group = found->second;
    if (group.order != args.order) op.error("order", "is not the order of the moe_group that wrote offsets");
    if (group.top_k != args.top_k) op.error("top_k", args.top_k, ", expected ", group.top_k, " as in moe_group");
    if (group.first != experts.first || group.count != experts.count) {
      op.error("offsets", "moe_group has experts first=", group.first, " count=", group.count,
               ", the weights first=", experts.first, " count=", experts.count);
    }
  }

  std::map<const int32_t*, glm_moe_group_args> written_;
};

}  // namespace

std::vector<BoundOp> bind_plan(const Plan& plan, const Resources& resources) {
  std::vector<BoundOp> ops;
  ops.reserve(plan.ops.size());
  Groupings groupings;
  for (const OpSpec& spec : plan.ops) {
    OpReader reader(resources, plan, spec);
    OpArgs args = bind_op(spec.kind, reader);
    if (spec.kind == GLM_OP_MOE_DOWN || spec.kind == GLM_OP_MOE_COMBINE) {
      reader.check_aliases("out", "base");
    } else {
      reader.check_aliases();
    }
    groupings.note(reader, args);
    std::visit([&](auto& typed) { typed.rows = reader.max_rows(); }, args);
    ops.push_back({spec.label, reader.rows(), args});
  }
  return ops;
}

}  // namespace glm
