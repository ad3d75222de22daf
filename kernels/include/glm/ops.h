/* What operations compute: one args struct an operation (those between ranks: exchange.h). kernels.h has the rules that
 * hold for all of them, and the table that brings them together. */
#ifndef GLM_OPS_H
#define GLM_OPS_H

#include "glm/exchange.h"
#include "glm/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `rows` comes first in every struct, because it alone varies from step to step. */

/* out[t] = table[token(t)], token(t) = token_ids[t] or, if that is -1, last_token[row_slots[t]]. */
typedef struct glm_embed_args {
  int32_t rows;
  const glm_step_inputs* step;
  const glm_slots* slots;
  glm_weight table;         /* [vocab][hidden] */
  glm_weight_format format; /* F32, BF16 or F16 */
  glm_tensor out;           /* act [rows][hidden] */
} glm_embed_args;

/* residual += delta (in place, rounded to act; delta may be absent; with `reduce` it is first summed over the ranks as
 * all_reduce does, and what it holds afterwards is not specified);
 * y = weight * act(residual * rsqrt(mean(residual^2) + eps)); written to `out` (act) and, quantised, to `q`, each
 * optional. Quantising: see glm_quantize_args. Source: Zhang & Sennrich 2019; rounding as transformers'
 * Glm4MoeRMSNorm. */
typedef struct glm_rms_norm_args {
  int32_t rows;
  glm_tensor residual; /* act [rows][hidden] */
  glm_tensor delta;    /* act, optional */
  const float* weight; /* [hidden] */
  float eps;
  glm_tensor out;   /* act, optional */
  glm_tensor q;     /* FP8, optional */
  glm_tensor scale; /* f32 [rows][1] or [rows][ceil(hidden/128)], with q */
  int32_t reduce;   /* 1: delta, which is there, is this rank's part of a sum */
} glm_rms_norm_args;

/* Dynamic symmetric FP8: over each group of columns (the whole row if scale.cols is 1, else 128 at a time, the last
 * one may be short) scale = absmax / 448 (1 if the group is all zero), q = fp8(x / scale). */
typedef struct glm_quantize_args {
  int32_t rows;
  glm_tensor x;     /* act */
  glm_tensor q;     /* FP8 */
  glm_tensor scale; /* f32 */
} glm_quantize_args;

/* out[t][n] = sum_k x[t][k] * w[n][k] (+ bias[n]), the parts' output channels one after another.
 * FP8 weights take FP8 activations: FP8_CHANNEL with one scale a row: (sum x.w) * x_scale * w_scale; FP8_BLOCK with a
 * scale per 128 columns: sum over blocks of (sum x.w) * x_scale[block] * w_scale[block]. Other formats take act
 * activations.
 * FP8 weights hold no NaN code (here and in the expert operations): the runtime refuses such a checkpoint, and a
 * kernel may read 0x7f and 0xff as +-480. */
typedef struct glm_linear_args {
  int32_t rows;
  int32_t num_parts;
  glm_weight_format format;
  glm_tensor x;       /* act or FP8 [rows][in] */
  glm_tensor x_scale; /* f32, with FP8 */
  glm_weight parts[GLM_MAX_PARTS];
  const float* bias[GLM_MAX_PARTS]; /* [parts[i].rows] or NULL */
  glm_tensor out;                   /* act or f32 [rows][sum of parts[i].rows] */
} glm_linear_args;

/* cols of qkv: heads*head_dim of q, then kv_heads*head_dim of k, then of v. q and k: RMSNorm over head_dim with
 * q_norm/k_norm (skipped if NULL; rounding as rms_norm), then rotate-half RoPE on the first rotary_dim dims: pairs (i,
 * i + rotary_dim/2), angle of position p from the table. K and V go to the page of the row's position; q to `out`.
 * Source: Su et al. 2021, in the NeoX layout. */
typedef struct glm_qk_norm_rope_store_args {
  int32_t rows;
  const glm_step_inputs* step;
  const glm_slots* slots;
  glm_tensor qkv;
  const float* q_norm; /* [head_dim] */
  const float* k_norm; /* [head_dim] */
  float eps;
  int32_t heads;
  int32_t rotary_dim;    /* even, <= head_dim */
  const float* rope_cos; /* [positions][rotary_dim/2] */
  const float* rope_sin;
  glm_kv_layer kv;
  glm_tensor out; /* act [rows][heads*head_dim] */
} glm_qk_norm_rope_store_args;

/* Causal softmax(q k^T * scale) v over the sequence's pages, keys 0..position(t). Query head h reads KV head h /
 * (heads/kv_heads). Any split of the keys depends on the sequence's own length only. Source: Dao 2022 (online
 * softmax); Kwon et al. 2023 (pages). */
typedef struct glm_paged_attention_args {
  int32_t rows;
  const glm_step_inputs* step;
  const glm_slots* slots;
  glm_tensor q; /* act [rows][heads*head_dim] */
  glm_kv_layer kv;
  int32_t heads;
  float softmax_scale;
  glm_tensor out; /* act [rows][heads*head_dim] */
} glm_paged_attention_args;

/* y = act(silu(x[:, :n])) * x[:, n:], rounded to act; to `out` and/or quantised to `q`. Source: Shazeer 2020
 * (SwiGLU). */
typedef struct glm_silu_mul_args {
  int32_t rows;
  glm_tensor x;     /* act [rows][2n] */
  glm_tensor out;   /* act [rows][n], optional */
  glm_tensor q;     /* FP8 [rows][n], optional */
  glm_tensor scale; /* f32, with q */
} glm_silu_mul_args;

/* Everything in f32: s = sigmoid(x W^T); choice by s + bias; with groups > 1 only the topk_groups groups with the
 * largest sum of their two best choices take part (ties: lower group); the top_k best (ties: lower id) in order of
 * choice, best first;
 * weights = s at them (never (s + bias) - bias), divided by (their sum + 1e-20) if normalize, times `scale`.
 * ids[t][j] = places[e] of the expert e chosen j-th: its place in the order in which ranks hold experts.
 * Source: DeepSeek-V3 (2024), as Glm4MoeTopkRouter. */
typedef struct glm_moe_route_args {
  int32_t rows;
  glm_tensor x;             /* act [rows][hidden] */
  glm_weight weight;        /* [experts][hidden] */
  glm_weight_format format; /* F32, BF16 or F16 */
  const float* bias;        /* [experts] or NULL */
  int32_t experts;
  int32_t top_k; /* <= 32 */
  int32_t groups;
  int32_t topk_groups;
  int32_t normalize;
  float scale;
  glm_tensor ids;        /* i32 [rows][top_k] */
  glm_tensor weights;    /* f32 [rows][top_k] */
  const int32_t* places; /* [experts]: a permutation; NULL: places[e] = e */
} glm_moe_route_args;

/* Pack: assignment a = t*top_k + j. order[offsets[e] .. offsets[e+1]) lists, ascending, the assignments of local
 * expert e (at place first + e); offsets[0] = 0; assignments of experts elsewhere are left out. With `loads`, each
 * local expert's number of assignments is added to loads[e], but for those of rows of `spare_slot`, which nobody
 * asked for. */
typedef struct glm_moe_group_args {
  int32_t rows;
  glm_tensor ids; /* i32 [rows][top_k] */
  int32_t top_k;
  int32_t first;
  int32_t count;
  int32_t* offsets;            /* [count + 1] */
  int32_t* order;              /* [max rows * top_k] */
  uint64_t* loads;             /* [count], optional */
  const glm_step_inputs* step; /* with loads */
  int32_t spare_slot;          /* with loads; -1: there is none */
} glm_moe_group_args;

/* For each listed assignment a of expert e, with x row t = a / top_k: g = gate_e x, u = up_e x (each rounded to act),
 * y = silu_mul(g, u), written at row a of `out` (act) or, quantised, of `q`. Rows of unlisted assignments are not
 * touched. out.dtype says what act is even where out.data is NULL. */
typedef struct glm_moe_gate_up_args {
  int32_t rows;
  int32_t top_k;
  glm_tensor x;       /* act or FP8 [rows][hidden] */
  glm_tensor x_scale; /* f32, with FP8 */
  glm_expert_weights gate;
  glm_expert_weights up;
  const int32_t* offsets;
  const int32_t* order;
  glm_tensor out;   /* act [rows*top_k][intermediate], optional */
  glm_tensor q;     /* FP8, optional */
  glm_tensor scale; /* f32, with q */
} glm_moe_gate_up_args;

/* Unpack and combine: out[t] = base[t] + sum over j ascending of weights[t][j] * act(down_e(x[t*top_k + j])), in
 * f32, rounded once. Slots j whose expert is not local add nothing. */
typedef struct glm_moe_down_args {
  int32_t rows;
  int32_t top_k;
  glm_tensor x;       /* act or FP8 [rows*top_k][intermediate] */
  glm_tensor x_scale; /* f32, with FP8 */
  glm_expert_weights down;
  const int32_t* offsets;
  const int32_t* order;
  glm_tensor ids;     /* i32 [rows][top_k] */
  glm_tensor weights; /* f32 [rows][top_k] */
  glm_tensor base;    /* act [rows][hidden], optional */
  glm_tensor out;     /* act [rows][hidden]; may be base (in place) */
} glm_moe_down_args;

/* out[s] = x[sample_rows[s]]. */
typedef struct glm_gather_rows_args {
  int32_t rows; /* S */
  const glm_step_inputs* step;
  glm_tensor x;   /* act */
  glm_tensor out; /* act */
} glm_gather_rows_args;

/* One token for each sample s, from logits[s] and the state of slot b = sample_slots[s]. Column i of the logits is token
 * first + i. Where they are not the whole vocabulary, the ranks of the device's group hold the rest, in order of rank,
 * and all of them choose the same token, the one that the whole row gives: results and slots are alike on every rank. A
 * device without a group chooses among its own columns. With position p =
 * positions[sample_rows[s]] + 1 (of the token being sampled) and n = p - prompt_len tokens sampled before it:
 *  1. repetition: l = l > 0 ? l / r : l * r for every token seen in prompt or output; l -= frequency * times sampled;
 *     l -= presence if sampled at all; l += bias; stop ids become -inf while n < min_tokens, and whatever the
 *     sample's mask does not have. NaN logits count as -inf.
 *  2. temperature 0: the largest l, ties to the lower id. Otherwise l /= temperature, then keep: the top_k largest; of
 *     those, the shortest prefix in order (l descending, id ascending) whose softmax sum (over what top_k kept)
 *     reaches top_p; of those, tokens with probability >= min_p * the largest. The best token is always kept.
 *  3. the kept token with the largest l + g, g = -log(-log(u)) (Gumbel-max: an exact draw, whatever order the tokens
 *     are visited in), u = ((x >> 9) + 0.5) * 2^-23 with x = word (id % 4) of philox4x32-10(counter = {id / 4, p, 0,
 *     0}, key = {seed low, seed high}).
 * A sample with a forced token takes no step but reports that token, and leaves the slot as it is.
 * Writes out_token_ids and, if num_logprobs >= 0, out_logprobs and num_logprobs entries of out_top_*; sets
 * last_token[b]; adds one to counts[b][token]. If every logit is -inf or NaN the token is -1 and last_token and counts
 * stay: the runtime reports it.
 * Sources: Salmon et al. 2011 (Philox); Holtzman et al. 2020 (top-p); Keskar et al. 2019 (repetition). */
typedef struct glm_sample_args {
  int32_t rows; /* S */
  const glm_step_inputs* step;
  const glm_slots* slots;
  glm_tensor logits; /* f32 [rows][columns]; overwritten */
  int32_t first;     /* a multiple of 4 */
} glm_sample_args;

typedef enum glm_op {
  GLM_OP_EMBED = 0,
  GLM_OP_RMS_NORM,
  GLM_OP_QUANTIZE,
  GLM_OP_LINEAR,
  GLM_OP_QK_NORM_ROPE_STORE,
  GLM_OP_PAGED_ATTENTION,
  GLM_OP_SILU_MUL,
  GLM_OP_MOE_ROUTE,
  GLM_OP_MOE_GROUP,
  GLM_OP_MOE_GATE_UP,
  GLM_OP_MOE_DOWN,
  GLM_OP_ALL_REDUCE,
  GLM_OP_GATHER_ROWS,
  GLM_OP_SAMPLE,
  GLM_OP_REDUCE_SCATTER,
  GLM_OP_ALL_GATHER,
  GLM_OP_MOE_DISPATCH,
  GLM_OP_MOE_DOWN_EACH,
  GLM_OP_MOE_COMBINE,
  GLM_OP_COUNT
} glm_op;

#ifdef __cplusplus
}
#endif

#endif
