/* Products of weight rows and activation rows: what linear, the router and the experts share. */
#ifndef GLM_CPU_MATMUL_H
#define GLM_CPU_MATMUL_H

#include <algorithm>
#include <cstddef>

#include "activations.h"

GLM_CPU_BEGIN

inline constexpr int32_t kMatmulTokens = 128;     /* most rows of x of one call */
inline constexpr int32_t kMatmulRows = 256;       /* most weight rows of one call */
inline constexpr int32_t kMatmulOutFloats = 4096; /* most values of one call's result */

inline int64_t element_bytes(glm_weight_format format) {
  switch (format) {
    case GLM_W_F32:
      return 4;
    case GLM_W_BF16:
    case GLM_W_F16:
      return 2;
    default:
      return 1;
  }
}

struct WeightMatrix {
  glm_weight weight;
  glm_weight_format format;
  int32_t cols;

  int64_t row_bytes() const { return weight.stride * element_bytes(format); }
  const std::byte* row(int32_t r) const { return static_cast<const std::byte*>(weight.data) + r * row_bytes(); }
};

/* Rows [begin, begin + rows) of a matrix, and the rows that the same thread will probably read next: they are fetched
 * into the cache towards the end. */
struct WeightRows {
  const WeightMatrix& matrix;
  int32_t begin;
  int32_t rows;
  const std::byte* then;
};

/* Rows of x: 0, 1, ... or, packed for an expert, order[0] / divisor, order[1] / divisor, ... */
struct TokenList {
  const int32_t* order;
  int32_t divisor;

  int64_t row(int64_t i) const { return order == nullptr ? i : order[i] / divisor; }
};

/* How many rows of each matrix a call should take, to suit `tokens` rows of x and spread the work on `num_matrices` of
 * them over the threads. At most what `matmul` takes. */
int32_t matmul_row_block(glm_weight_format format, int32_t rows, int32_t cols, int64_t num_matrices, int64_t tokens,
                         int num_threads);

/* out[i][r] = w[begin + r] . x[tokens.row(token_begin + i)], scales applied, for i < num_tokens and r < w.rows; rows of
 * `out` follow each other without gaps. `kept`: a thread's KeptWeights for this many columns. num_tokens <= kMatmulTokens, w.rows <= kMatmulRows, num_tokens * w.rows <=
 * kMatmulOutFloats. */
void matmul(const WeightRows& w, const Activations& x, const TokenList& tokens, int64_t token_begin, int32_t num_tokens,
            float* out, float* kept);

GLM_CPU_END

#endif
