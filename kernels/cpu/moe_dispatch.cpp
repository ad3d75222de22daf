#include <algorithm>

#include "exchange.h"
#include "ops.h"
#include "own_rows.h"

GLM_CPU_BEGIN

namespace {

/* A row of another rank. */
void take_row(const glm_moe_dispatch_args& from, const glm_moe_dispatch_args* args, int64_t row) {
  copy_row(from.ids, args->ids, row);
  const auto* ids = static_cast<const int32_t*>(row_of(args->ids, row));
  const auto is_local = [&](int32_t id) { return id >= args->first && id < args->first + args->count; };
  if (std::none_of(ids, ids + args->top_k, is_local)) return;
  copy_row(from.x, args->x, row);
  if (args->x_scale.data != nullptr) copy_row(from.x_scale, args->x_scale, row);
}

}  // namespace

glm_status moe_dispatch(glm_device* device, const glm_moe_dispatch_args* args) {
  if (args->rows == 0) return GLM_OK;
  Exchange exchange(device);
  if (exchange.alone()) return GLM_OK;
  const glm_moe_dispatch_args* ranks[GLM_MAX_RANKS];
  if (!exchange.gather(args, ranks)) return exchange.status();
  for (int rank = 0; rank < exchange.num_ranks(); ++rank) {
    if (rank == exchange.rank()) continue;
    const RowRange theirs = own_rows(args->rows, rank, exchange.num_ranks());
    for (int64_t row = theirs.begin; row < theirs.end; ++row) take_row(*ranks[rank], args, row);
  }
  exchange.release();
  return exchange.status();
}

GLM_CPU_END
