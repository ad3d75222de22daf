/* Operations by which the ranks of a group exchange rows: one args struct each. */
#ifndef GLM_EXCHANGE_H
#define GLM_EXCHANGE_H

#include "glm/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* x[t] = sum over the ranks of the device's group, ascending, of their x[t], in f32, rounded once; in place, and the
 * same bits on every rank. */
typedef struct glm_all_reduce_args {
  int32_t rows;
  glm_tensor x; /* act */
} glm_all_reduce_args;

/* The exchange of tokens: each rank r of R has rows [rows*r/R, rows*(r+1)/R) of a step to itself. All of its operations
 * are in place in buffers with a row for each of the step's: a row is where it is on every rank. */

/* x[t] = what all_reduce makes of it, for this rank's own rows; what other rows hold afterwards is not specified. */
typedef struct glm_reduce_scatter_args {
  int32_t rows;
  glm_tensor x; /* act */
} glm_reduce_scatter_args;

/* x[t] = x[t] of the rank that has row t to itself. */
typedef struct glm_all_gather_args {
  int32_t rows;
  glm_tensor x; /* any dtype */
} glm_all_gather_args;

/* ids[t] = ids[t] of the rank that has row t to itself; and so are x[t] and x_scale[t] where one of ids[t] is in
 * [first, first + count). Other rows that are not this rank's own are not touched. */
typedef struct glm_moe_dispatch_args {
  int32_t rows;
  int32_t top_k;
  int32_t first;
  int32_t count;
  glm_tensor ids;     /* i32 [rows][top_k] */
  glm_tensor x;       /* act or FP8 [rows][hidden] */
  glm_tensor x_scale; /* f32, with FP8 */
} glm_moe_dispatch_args;

/* out[a] = act(down_e(x[a])) for each listed assignment a of expert e, where the moe_combine that follows reads it: in `out` of this rank, or
 * of the rank that has the token a / top_k to itself, which until then may find rows of its `out` written by others. Rows of assignments
 * that no rank lists are not touched. */
typedef struct glm_moe_down_each_args {
  int32_t rows;
  int32_t top_k;
  glm_tensor x;       /* act or FP8 [rows*top_k][intermediate] */
  glm_tensor x_scale; /* f32, with FP8 */
  glm_expert_weights down;
  const int32_t* offsets;
  const int32_t* order;
  glm_tensor out; /* act [rows*top_k][hidden] */
} glm_moe_down_each_args;

/* out[t] = base[t] + sum over j ascending of weights[t][j] * products[t*top_k + j], in f32, rounded once, for this rank's
 * own rows: what moe_down makes of experts that are all on one rank. Rank ids[t][j] / count has computed the product, in the moe_down_each
 * before this. */
typedef struct glm_moe_combine_args {
  int32_t rows;
  int32_t top_k;
  int32_t count;       /* experts of each rank */
  glm_tensor ids;      /* i32 [rows][top_k] */
  glm_tensor weights;  /* f32 [rows][top_k] */
  glm_tensor products; /* act [rows*top_k][hidden] */
  glm_tensor base;     /* act [rows][hidden], optional */
  glm_tensor out;      /* act [rows][hidden]; may be base (in place) */
} glm_moe_combine_args;

#ifdef __cplusplus
}
#endif

#endif
