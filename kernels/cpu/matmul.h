/* Products of weight rows and activation rows: what linear, the router and the experts share. */
#ifndef GLM_CPU_MATMUL_H
#define GLM_CPU_MATMUL_H

#include <algorithm>

#include "activations.h"

GLM_CPU_BEGIN

inline constexpr int32_t kPanelRows = 12;    /* weight rows that are expanded to f32 at a time */
inline constexpr int32_t kPanelTokens = 128; /* rows of x that share one expansion */
inline constexpr int32_t kPanelCols = 384;   /* a panel and four rows of x stay in the first-level cache */
inline constexpr int32_t kDirectTokens = 8;  /* up to so many, weights are expanded in registers only */
inline constexpr int32_t kDirectRows = 256;  /* most weight rows of one call then */

/* Floats of one call's result, at most. */
inline constexpr size_t kMatmulOutFloats =
    static_cast<size_t>(std::max(kPanelRows * kPanelTokens, kDirectRows* kDirectTokens));

struct WeightMatrix {
  glm_weight weight;
  glm_weight_format format;
  int32_t cols;
};

/* Rows of x: 0, 1, ... or, packed for an expert, order[0] / divisor, order[1] / divisor, ... */
struct TokenList {
  const int32_t* order;
  int32_t divisor;

  int64_t row(int64_t i) const { return order == nullptr ? i : order[i] / divisor; }
};

struct MatmulScratch {
  float* weights; /* [kPanelRows][kPanelCols] */
  float* sums;    /* [kPanelRows * kPanelTokens][kLanes] */
  float* out;     /* [kMatmulOutFloats] */
};

size_t matmul_scratch_floats();
/* The scratch of thread `thread`, in a block of num_threads * matmul_scratch_floats(). */
MatmulScratch matmul_scratch(float* block, int thread);

/* How many of a matrix's rows a call should take, to suit `tokens` rows of x and spread the work over the threads. At
 * most what `matmul` takes. */
int32_t matmul_row_block(glm_weight_format format, int32_t rows, int32_t cols, int64_t tokens, int num_threads);

/* scratch.out[i][r] = w[row_begin + r] . x[tokens.row(token_begin + i)], scales applied, for i < num_tokens and r <
 * rows; rows of `out` follow each other without gaps. num_tokens <= kPanelTokens; rows <= kPanelRows, or kDirectRows if
 * num_tokens <= kDirectTokens. */
void matmul(const WeightMatrix& matrix, int32_t row_begin, int32_t rows, const Activations& x, const TokenList& tokens,
            int64_t token_begin, int32_t num_tokens, const MatmulScratch& scratch);

GLM_CPU_END

#endif
