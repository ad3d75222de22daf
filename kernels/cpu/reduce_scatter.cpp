#include <algorithm>

#include "exchange.h"
#include "ops.h"
#include "own_rows.h"

GLM_CPU_BEGIN

namespace {

constexpr int64_t kPiece = 1024; /* elements that a thread adds up at a time */

void* element(const glm_tensor& x, int64_t row, int64_t col) {
  return static_cast<std::byte*>(row_of(x, row)) + col * static_cast<int64_t>(dtype_bytes(x.dtype));
}

}  // namespace

glm_status reduce_scatter(glm_device* device, const glm_reduce_scatter_args* args) {
  if (args->rows == 0) return GLM_OK;
  Exchange exchange(device);
  if (exchange.alone()) return GLM_OK;
  const glm_tensor* ranks[GLM_MAX_RANKS];
  if (!exchange.gather(&args->x, ranks)) return exchange.status();
  const RowRange own = own_rows(args->rows, exchange.rank(), exchange.num_ranks());
  const int64_t pieces = (args->x.cols + kPiece - 1) / kPiece;
  parallel_for(device->pool, (own.end - own.begin) * pieces, 1, [&](int64_t begin, int64_t end, int) {
    float sum[kPiece];
    float term[kPiece];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = own.begin + i / pieces;
      const int64_t col = i % pieces * kPiece;
      const int64_t n = std::min(kPiece, args->x.cols - col);
      load_floats(element(*ranks[0], row, col), args->x.dtype, sum, n);
      for (int rank = 1; rank < exchange.num_ranks(); ++rank) {
        load_floats(element(*ranks[rank], row, col), args->x.dtype, term, n);
        for (int64_t k = 0; k < n; ++k) sum[k] += term[k];
      }
      store_act(sum, args->x.dtype, element(args->x, row, col), n);
    }
  });
  exchange.release();
  return exchange.status();
}

GLM_CPU_END
