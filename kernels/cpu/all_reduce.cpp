#include <algorithm>

#include "exchange.h"
#include "ops.h"
#include "tensor_access.h"

GLM_CPU_BEGIN

namespace {

constexpr int64_t kPiece = 1024; /* elements that a thread adds up at a time */
constexpr int64_t kLine = 32;    /* ranks write whole cache lines */

struct Columns {
  int64_t begin;
  int64_t end;
};

/* Each rank adds up some columns, of all rows, and writes the sums to every rank. */
Columns columns_of(int64_t cols, int rank, int num_ranks) {
  const int64_t lines = (cols + kLine - 1) / kLine;
  return {std::min(cols, lines * rank / num_ranks * kLine), std::min(cols, lines * (rank + 1) / num_ranks * kLine)};
}

void* element(const glm_tensor& x, int64_t row, int64_t col) {
  return static_cast<std::byte*>(row_of(x, row)) + col * static_cast<int64_t>(dtype_bytes(x.dtype));
}

void add_up(const glm_tensor* const* ranks, int num_ranks, int64_t row, int64_t col, int64_t n) {
  float sum[kPiece];
  float term[kPiece];
  load_floats(element(*ranks[0], row, col), ranks[0]->dtype, sum, n);
  for (int rank = 1; rank < num_ranks; ++rank) {
    load_floats(element(*ranks[rank], row, col), ranks[rank]->dtype, term, n);
    for (int64_t i = 0; i < n; ++i) sum[i] += term[i];
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    store_act(sum, ranks[rank]->dtype, element(*ranks[rank], row, col), n);
  }
}

}  // namespace

glm_status all_reduce(glm_device* device, const glm_all_reduce_args* args) {
  if (args->rows == 0) return GLM_OK;
  Exchange exchange(device);
  if (exchange.alone()) return GLM_OK;
  const glm_tensor* ranks[GLM_MAX_RANKS];
  if (!exchange.gather(&args->x, ranks)) return exchange.status();
  const Columns own = columns_of(args->x.cols, exchange.rank(), exchange.num_ranks());
  const int64_t pieces = (own.end - own.begin + kPiece - 1) / kPiece;
  parallel_for(device->pool, args->rows * pieces, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = own.begin + i % pieces * kPiece;
      add_up(ranks, exchange.num_ranks(), i / pieces, col, std::min(kPiece, own.end - col));
    }
  });
  exchange.release();
  return exchange.status();
}

GLM_CPU_END
