#include <algorithm>

#include "exchange.h"
#include "ops.h"
#include "own_rows.h"

GLM_CPU_BEGIN

namespace {

constexpr int64_t kPiece = 1024; /* columns that a thread combines at a time */

void* element(const glm_tensor& x, int64_t row, int64_t col) {
  return static_cast<std::byte*>(row_of(x, row)) + col * static_cast<int64_t>(dtype_bytes(x.dtype));
}

/* Columns [col, col + n) of row t, as moe_down combines them; `ranks` have the products. */
void combine(const glm_moe_combine_args* args, const glm_tensor* const* ranks, int64_t t, int64_t col, int64_t n) {
  float sum[kPiece];
  float term[kPiece];
  const auto* ids = static_cast<const int32_t*>(row_of(args->ids, t));
  const auto* weights = static_cast<const float*>(row_of(args->weights, t));
  if (args->base.data != nullptr) {
    load_floats(element(args->base, t, col), args->base.dtype, sum, n);
  } else {
    std::fill_n(sum, n, 0.0f);
  }
  for (int32_t j = 0; j < args->top_k; ++j) {
    const glm_tensor& products = *ranks[ids[j] / args->count];
    load_floats(element(products, t * args->top_k + j, col), products.dtype, term, n);
    for (int64_t i = 0; i < n; ++i) sum[i] += weights[j] * term[i];
  }
  store_act(sum, args->out.dtype, element(args->out, t, col), n);
}

}  // namespace

glm_status moe_combine(glm_device* device, const glm_moe_combine_args* args) {
  if (args->rows == 0) return GLM_OK;
  Exchange exchange(device);
  const glm_tensor* ranks[GLM_MAX_RANKS] = {&args->products};
  if (!exchange.alone() && !exchange.gather(&args->products, ranks)) return exchange.status();
  const RowRange own = own_rows(args->rows, exchange.rank(), exchange.num_ranks());
  const int64_t pieces = (args->out.cols + kPiece - 1) / kPiece;
  parallel_for(device->pool, (own.end - own.begin) * pieces, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = i % pieces * kPiece;
      combine(args, ranks, own.begin + i / pieces, col, std::min<int64_t>(kPiece, args->out.cols - col));
    }
  });
  if (!exchange.alone()) exchange.release();
  return exchange.status();
}

GLM_CPU_END
