/* What operations take: limits, statuses, dtypes, weights, the state of slots and one step's inputs. */
#ifndef GLM_TYPES_H
#define GLM_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GLM_PAGE_SIZE 16       /* tokens in a KV page */
#define GLM_MAX_PARTS 4        /* row blocks of one fused linear */
#define GLM_MAX_STOP_IDS 64    /* stop ids of a request, the model's own included */
#define GLM_MAX_LOGIT_BIAS 300 /* biased tokens of a request */
#define GLM_MAX_LOGPROBS 20    /* alternatives reported beside a sampled token */
#define GLM_FP8_MAX 448.0f
#define GLM_FP8_BLOCK 128 /* side of a weight scale block, and length of an activation group */

typedef enum glm_status {
  GLM_OK = 0,
  GLM_INVALID_ARGUMENT = 1, /* the caller's values are out of range */
  GLM_UNSUPPORTED = 2,      /* this build, table or machine cannot do it */
  GLM_BAD_CHECKPOINT = 3,   /* a weight file contradicts the plan or itself */
  GLM_OUT_OF_MEMORY = 4,
  GLM_DEVICE_ERROR = 5, /* a device or communicator call failed */
  GLM_INTERNAL = 6
} glm_status;

typedef enum glm_dtype { GLM_F32 = 0, GLM_BF16 = 1, GLM_F16 = 2, GLM_FP8_E4M3 = 3, GLM_I32 = 4, GLM_U16 = 5 } glm_dtype;

/* How a weight's bytes become numbers. */
typedef enum glm_weight_format {
  GLM_W_F32 = 0,
  GLM_W_BF16 = 1,
  GLM_W_F16 = 2,
  GLM_W_FP8_CHANNEL = 3, /* w[n][k] * scale[n] */
  GLM_W_FP8_BLOCK = 4    /* w[n][k] * scale[n / 128][k / 128] */
} glm_weight_format;

/* A block of activations or indices, [rows][cols]. */
typedef struct glm_tensor {
  void* data; /* NULL: absent, where an operation allows that */
  glm_dtype dtype;
  int32_t cols;
  int64_t stride;
} glm_tensor;

/* `rows` x `cols` weights that lie together in one checkpoint tensor. */
typedef struct glm_weight {
  const void* data;
  int64_t stride;     /* elements from one output channel to the next */
  const float* scale; /* FP8_CHANNEL: [rows]; FP8_BLOCK: [ceil(rows/128)][scale_stride]; else NULL */
  int64_t scale_stride;
  int32_t rows;
} glm_weight;

/* Experts at places [first, first + count), one weight each; every expert has the same shape. */
typedef struct glm_expert_weights {
  const glm_weight* experts; /* [count], in device memory */
  glm_weight_format format;
  int32_t first;
  int32_t count;
  int32_t rows; /* output channels */
  int32_t cols; /* input channels */
} glm_expert_weights;

/* K and V of one layer: [pages][kv_heads][GLM_PAGE_SIZE][head_dim], bf16, f32 or FP8 (scale 1). */
typedef struct glm_kv_layer {
  void* k;
  void* v;
  glm_dtype dtype;
  int32_t kv_heads;
  int32_t head_dim;
} glm_kv_layer;

/* What a request asks of the sampler. Kept per slot for as long as the slot is bound. */
typedef struct glm_sampling {
  uint64_t seed;
  float temperature;        /* 0: greedy */
  float top_p;              /* (0, 1]; 1: off */
  float min_p;              /* [0, 1]; 0: off */
  float repetition_penalty; /* > 0; 1: off */
  float frequency_penalty;  /* 0: off */
  float presence_penalty;   /* 0: off */
  int32_t top_k;            /* 0: off */
  int32_t min_tokens;       /* stop ids are masked until this many tokens have been sampled */
  int32_t prompt_len;       /* tokens before the first sampled one */
  int32_t num_logprobs;     /* -1: none; 0: of the sampled token; n: and of the n best */
  int32_t num_stop_ids;
  int32_t num_bias;
  int32_t stop_ids[GLM_MAX_STOP_IDS];
  int32_t bias_ids[GLM_MAX_LOGIT_BIAS];
  float bias_values[GLM_MAX_LOGIT_BIAS];
} glm_sampling;

/* State of all slots: one slot per running request. Owned by the runtime, at fixed addresses. */
typedef struct glm_slots {
  glm_sampling* sampling; /* [max_slots] */
  int32_t* last_token;    /* [max_slots]: the newest sampled token, written by `sample`, read by `embed` */
  int32_t* page_table;    /* [max_slots][max_pages]: page ids in order of position */
  uint16_t* counts;       /* [max_slots][vocab]: bit 15: in the prompt; bits 0-14: times sampled (saturating) */
  int32_t max_slots;
  int32_t max_pages;
  int32_t vocab;
} glm_slots;

/* A slot's page table entry, in force from this step on. */
typedef struct glm_page_update {
  int32_t slot;
  int32_t index; /* position / GLM_PAGE_SIZE */
  int32_t page;
} glm_page_update;

/* One step's inputs: written before a step, never moved. A sequence's rows are adjacent, its positions consecutive. */
typedef struct glm_step_inputs {
  int32_t num_rows;        /* T: tokens in this step */
  int32_t num_seqs;        /* sequences in this step */
  int32_t num_samples;     /* S: rows whose next token is sampled */
  int32_t* token_ids;      /* [T]; -1: the slot's last_token */
  int32_t* positions;      /* [T] */
  int32_t* row_slots;      /* [T] */
  int32_t* seq_slots;      /* [num_seqs] */
  int32_t* seq_starts;     /* [num_seqs + 1]: first row of each sequence, then T */
  int32_t* sample_rows;    /* [S]: index of a row of this step */
  int32_t* sample_slots;   /* [S] */
  int32_t* out_token_ids;  /* [S] */
  float* out_logprobs;     /* [S]: log-softmax of the model's own logits (no penalty, no temperature) at the token */
  int32_t* out_top_ids;    /* [S][GLM_MAX_LOGPROBS]: best first, ties by lower id */
  float* out_top_logprobs; /* [S][GLM_MAX_LOGPROBS] */
  int32_t* sample_masks;   /* [S]: the row of `masks` with the tokens that may be sampled; -1: any may */
  int32_t* forced_tokens;  /* [S]: reported in place of a sampled token, and no state changes; -1: sample */
  uint32_t* masks;         /* [masks][ceil(vocab / 32)]: bit id % 32 of word id / 32; written before `sample` only */
} glm_step_inputs;

#ifdef __cplusplus
}
#endif

#endif
