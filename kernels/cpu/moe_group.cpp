#include <algorithm>

#include "ops.h"
#include "tensor_access.h"

GLM_CPU_BEGIN

namespace {

template <typename Visit>
void for_each_local(const glm_moe_group_args* args, Visit visit) {
  for (int32_t t = 0; t < args->rows; ++t) {
    const auto* ids = static_cast<const int32_t*>(row_of(args->ids, t));
    for (int32_t j = 0; j < args->top_k; ++j) {
      const int32_t e = ids[j] - args->first;
      if (e >= 0 && e < args->count) visit(e, t * args->top_k + j);
    }
  }
}

void add_loads(const glm_moe_group_args* args) {
  for_each_local(args, [&](int32_t e, int32_t assignment) {
    args->loads[e] += args->step->row_slots[assignment / args->top_k] != args->spare_slot ? 1 : 0;
  });
}

}  // namespace

/* A counting sort: stable, so each expert's list ascends. */
glm_status moe_group(glm_device*, const glm_moe_group_args* args) {
  if (args->rows == 0) return GLM_OK;
  int32_t* offsets = args->offsets;
  std::fill_n(offsets, args->count + 1, 0);
  for_each_local(args, [&](int32_t e, int32_t) { ++offsets[e + 1]; });
  for (int32_t e = 0; e < args->count; ++e) offsets[e + 1] += offsets[e];
  /* While packing, offsets[e] runs to the end of e's list, which is the start of the next one's. */
  for_each_local(args, [&](int32_t e, int32_t assignment) { args->order[offsets[e]++] = assignment; });
  for (int32_t e = args->count; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
  if (args->loads != nullptr) add_loads(args);
  return GLM_OK;
}

GLM_CPU_END
