#include "memory/expert_loads.h"

#include <algorithm>

#include "plan/fields.h"

namespace glm {
namespace {

// What is wrong in itself is found when the op is bound.
int32_t local_experts(const OpSpec& op) {
  return parse_int32(op.values.find("count")->second).value_or(0);
}

}  // namespace

ExpertLoads::ExpertLoads(const Plan& mixed, const Plan& decode, Arena& arena) {
  for (const Plan* plan : {&mixed, &decode}) {
    for (const OpSpec& op : plan->ops) {
      if (op.kind != GLM_OP_MOE_GROUP || places_.contains(op.label)) continue;
      places_.emplace(op.label, Place{size_, local_experts(op)});
      size_ += static_cast<size_t>(std::max(0, local_experts(op)));
    }
  }
  data_ = arena.allocate<uint64_t>("loads of experts", {static_cast<int64_t>(size_)});
  arena.device().fill(data_, 0, size_ * sizeof(uint64_t));
}

uint64_t* ExpertLoads::find(const std::string& label, int32_t count) const {
  const auto found = places_.find(label);
  return found == places_.end() || found->second.count != count ? nullptr : data_ + found->second.first;
}

}  // namespace glm
