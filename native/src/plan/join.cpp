#include <map>

#include "plan/plan.h"
#include "support/error.h"

namespace glm {
namespace {

template <class Spec>
void join(std::vector<Spec>& all, const std::vector<Spec>& more, const char* kind) {
  std::map<std::string_view, size_t> known;
  for (size_t i = 0; i < all.size(); ++i) known.emplace(all[i].name, i);
  std::vector<Spec> added;
  for (const Spec& spec : more) {
    const auto found = known.find(spec.name);
    if (found == known.end()) {
      added.push_back(spec);
    } else if (all[found->second] != spec) {
      fail(GLM_INVALID_ARGUMENT, "decode plan, line ", spec.line.number, ": ", kind, " ", spec.name,
           " differs from line ", all[found->second].line.number, " of the mixed plan");
    }
  }
  all.insert(all.end(), added.begin(), added.end());
}

}  // namespace

Declarations join_declarations(const Plan& mixed, const Plan& decode) {
  Declarations all = mixed.declarations;
  const Declarations& more = decode.declarations;
  const auto agree = [](bool same, const char* what) {
    if (!same) fail(GLM_INVALID_ARGUMENT, "the mixed and the decode plan differ in '", what, "'");
  };
  agree(all.act == more.act, "act");
  agree(all.vocab == more.vocab, "vocab");
  agree(all.kv == more.kv, "kv");
  join(all.ropes, more.ropes, "rope");
  join(all.placements, more.placements, "placement");
  join(all.buffers, more.buffers, "buffer");
  join(all.vectors, more.vectors, "vector");
  join(all.matrices, more.matrices, "matrix");
  join(all.experts, more.experts, "experts");
  return all;
}

}  // namespace glm
