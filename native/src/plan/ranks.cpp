#include <algorithm>

#include "plan/fields.h"
#include "plan/op_form.h"
#include "plan/plan.h"
#include "support/error.h"

namespace glm {
namespace {

template <class... Parts>
[[noreturn]] void rank_error(const Plan& plan, size_t rank, const Parts&... parts) {
  fail(GLM_INVALID_ARGUMENT, plan.name, " plan of rank ", rank, parts...);
}

void check_same_calls(const Plan& first, const Plan& other, size_t rank) {
  if (first.declarations.act != other.declarations.act) rank_error(other, rank, ": 'act' differs from rank 0");
  if (first.declarations.vocab != other.declarations.vocab) rank_error(other, rank, ": 'vocab' differs from rank 0");
  if (first.declarations.placements != other.declarations.placements) {
    rank_error(other, rank, ": its placements differ from rank 0");
  }
  if (first.ops.size() != other.ops.size()) {
    rank_error(other, rank, ": ", other.ops.size(), " ops, expected ", first.ops.size(), " as on rank 0");
  }
  for (size_t i = 0; i < first.ops.size(); ++i) {
    const OpSpec& wanted = first.ops[i];
    const OpSpec& found = other.ops[i];
    if (found.kind == wanted.kind && found.label == wanted.label) continue;
    rank_error(other, rank, ", line ", found.line.number, ": op ", op_form(found.kind).name, " ", found.label,
               ", expected op ", op_form(wanted.kind).name, " ", wanted.label, " as on rank 0");
  }
}

// Tokens go to rank id / count for an expert's place `id`.
void check_dispatch(const Plan& plan, size_t rank) {
  for (const OpSpec& op : plan.ops) {
    if (op.kind != GLM_OP_MOE_DISPATCH) continue;
    const int64_t first = parse_int32(op.values.find("first")->second).value_or(0);
    const int64_t count = parse_int32(op.values.find("count")->second).value_or(0);
    if (first == static_cast<int64_t>(rank) * count) continue;
    rank_error(plan, rank, ", line ", op.line.number, ": op moe_dispatch ", op.label, ": first ", first, ", expected ",
               static_cast<int64_t>(rank) * count, ", rank * count");
  }
}

bool meets_ranks(const OpSpec& op) {
  const auto reduce = op.values.find("reduce");
  const auto rows = op.values.find("rows");
  if (rows != op.values.end() && rows->second == "O") return true;
  return is_exchange(op.kind) || (reduce != op.values.end() && reduce->second == "1");
}

// The tokens of its logits; what is wrong in itself is found when the op is bound.
Range sampled_tokens(const Plan& plan) {
  const auto is_sample = [](const OpSpec& op) { return op.kind == GLM_OP_SAMPLE; };
  const OpSpec& op = *std::ranges::find_if(plan.ops, is_sample);
  const auto first = op.values.find("first");
  const int32_t begin = first == op.values.end() ? 0 : parse_int32(first->second).value_or(0);
  const auto is_logits = [&](const BufferSpec& buffer) { return buffer.name == op.values.find("logits")->second; };
  const auto logits = std::ranges::find_if(plan.declarations.buffers, is_logits);
  return {begin, begin + (logits == plan.declarations.buffers.end() ? 0 : logits->cols)};
}

}  // namespace

void check_ranks(const std::vector<const Plan*>& ranks) {
  const Plan& first = *ranks.front();
  if (ranks.size() == 1) {
    const auto reduce = std::ranges::find_if(first.ops, meets_ranks);
    if (reduce == first.ops.end()) return;
    rank_error(first, 0, ", line ", reduce->line.number, ": op ", op_form(reduce->kind).name, " ", reduce->label,
               ": an engine of one rank has nobody to exchange data with");
  }
  int64_t next = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    check_same_calls(first, *ranks[rank], rank);
    check_dispatch(*ranks[rank], rank);
    const Range tokens = sampled_tokens(*ranks[rank]);
    if (tokens.begin != next) {
      rank_error(*ranks[rank], rank, ": samples tokens from ", tokens.begin, ", expected from ", next);
    }
    next = tokens.end;
  }
  if (next != first.declarations.vocab) {
    fail(GLM_INVALID_ARGUMENT, first.name, " plans: the ranks sample ", next, " tokens together, expected vocab ",
         first.declarations.vocab);
  }
}

}  // namespace glm
