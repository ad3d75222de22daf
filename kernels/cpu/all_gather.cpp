#include "exchange.h"
#include "ops.h"
#include "own_rows.h"

GLM_CPU_BEGIN

glm_status all_gather(glm_device* device, const glm_all_gather_args* args) {
  if (args->rows == 0) return GLM_OK;
  Exchange exchange(device);
  if (exchange.alone()) return GLM_OK;
  const glm_tensor* ranks[GLM_MAX_RANKS];
  if (!exchange.gather(&args->x, ranks)) return exchange.status();
  for (int rank = 0; rank < exchange.num_ranks(); ++rank) {
    if (rank == exchange.rank()) continue;
    const RowRange theirs = own_rows(args->rows, rank, exchange.num_ranks());
    for (int64_t row = theirs.begin; row < theirs.end; ++row) copy_row(*ranks[rank], args->x, row);
  }
  exchange.release();
  return exchange.status();
}

GLM_CPU_END
