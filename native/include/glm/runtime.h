/* The runtime: one engine per process, of one rank or several, each with a thread and a device of its own. It maps a checkpoint, binds plans to a kernel table, keeps the KV
 * pages and the request slots, and runs steps. What runs when, and which pages belong to whom, is the caller's
 * business (the scheduler).
 *
 * Threads: submit/collect/bind/release are called from one thread (the engine loop); info and status text from any.
 * Steps run in order on the engine's own thread. Nothing throws across this boundary and nothing aborts the process.
 *
 * Errors: every call that can fail returns a glm_status and fills `error` (may be NULL) with one line that names what
 * is wrong (tensor, shard, op label, argument) and what was expected. After GLM_DEVICE_ERROR or GLM_INTERNAL from a
 * step the engine is failed: each later call returns the same error.
 *
 * Names users may know from other engines: init_engine = glm_engine_create; prefill, decode_step and run_batch_decode
 * = glm_engine_submit + glm_engine_collect of one batch that may mix both; free_request_state =
 * glm_engine_release_slot; free_engine = glm_engine_destroy; get_engine_info = glm_engine_get_info.
 */
#ifndef GLM_RUNTIME_H
#define GLM_RUNTIME_H

#include "glm/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GLM_RUNTIME_VERSION 7u
#define GLM_MAX_DIMS 4
#define GLM_MAX_IN_FLIGHT 2 /* steps submitted and not yet collected */

typedef struct glm_engine glm_engine;

typedef struct glm_error {
  char message[1024];
} glm_error;

/* Where one checkpoint tensor lies. The reader of the safetensors headers checked it; mapping checks it again
 * against the file. Without a file its values are made up: they lie evenly in mean +- spread, and seed, mean, spread and
 * the place of an element alone decide what it is. dtype is then F32, BF16 or F8_E4M3; `offset` is not read. */
typedef struct glm_tensor_source {
  const char* name;
  const char* path; /* shard file; NULL: none */
  uint64_t offset;  /* of the first byte, from the start of the file */
  uint64_t bytes;
  const char* dtype; /* safetensors' spelling: F32, BF16, F16, F8_E4M3 */
  int32_t rank;
  int64_t shape[GLM_MAX_DIMS];
  uint64_t seed; /* without a file, as the next two */
  float mean;
  float spread;
} glm_tensor_source;

/* A rank: its device and its share of the model. */
typedef struct glm_rank_options {
  int32_t device_ordinal;
  const char* mixed_plan;  /* plan text (native/PLAN.md): GLM_PLAN_MIXED */
  const char* decode_plan; /* plan text: GLM_PLAN_DECODE */
  const char* driver_path; /* shared object of a driver compiled from these plans (driver.h); NULL: built-in executor */
} glm_rank_options;

typedef struct glm_engine_options {
  const char* kernels_path;      /* shared object of the kernel table */
  int32_t num_threads;           /* see glm_device_options; the ranks share them, at least one each */
  const glm_rank_options* ranks; /* their plans make the same calls */
  int32_t num_ranks;
  const glm_tensor_source* tensors; /* all tensors that the plans name */
  int32_t num_tensors;
  int32_t max_rows;    /* T of a step, at most */
  int32_t max_samples; /* S of a step and sequences of a step, at most */
  int32_t max_slots;
  int32_t max_context; /* tokens of one sequence; multiple of GLM_PAGE_SIZE */
  int32_t num_pages;   /* of the KV pool */
  int32_t fit_pages;   /* not 0: num_pages is the most; fewer, at least one, where memory does not hold as many */
  int32_t random_kv;   /* not 0: pages begin with made-up keys and values, to measure steps without their prefill */
  /* Called from loading threads with bytes done and total, at most a few times a second: by each rank with none done as its weights
   * begin to be read, and when all of them are where steps read them. May be NULL. */
  void (*progress)(void* context, uint64_t done, uint64_t total);
  void* progress_context;
} glm_engine_options;

/* What a step in flight is at. */
typedef struct glm_engine_progress {
  uint64_t calls;   /* of ops, begun by all ranks so far: two equal readings are a standstill between them */
  char where[1024]; /* "rank 1 in op linear layers.0.attn.o of step 7; rank 0 in op all_reduce ...": who keeps others
                       waiting comes first; empty between steps */
} glm_engine_progress;

typedef struct glm_engine_info {
  char kernels[32];             /* table name */
  char device[128];             /* table's description */
  uint64_t weight_bytes_mapped; /* used in place, in the file's own pages */
  uint64_t weight_bytes_copied; /* norms, scales and biases as f32; all weights where the device has its own memory */
  uint64_t kv_bytes;
  uint64_t scratch_bytes; /* buffers, workspace, slots, step inputs */
  int32_t num_pages;
  int32_t max_slots;
  int32_t max_context;
  int32_t vocab;
  uint64_t steps_run;
} glm_engine_info;

/* Which plan a step runs. A row's numbers may differ between the two in their last bits (on a GPU their kernels round
 * differently), so the caller chooses by what the rows are, never by how many there are. */
typedef enum glm_plan_kind {
  GLM_PLAN_MIXED = 0, /* any step */
  GLM_PLAN_DECODE = 1 /* one row a sequence, every row sampled */
} glm_plan_kind;

/* One step. Every array is copied before submit returns. See glm_step_inputs for the meaning of the fields. */
typedef struct glm_step_batch {
  int32_t num_rows;
  int32_t num_seqs;
  int32_t num_samples;
  int32_t num_page_updates;
  glm_plan_kind plan;
  const int32_t* token_ids;   /* [num_rows] */
  const int32_t* positions;   /* [num_rows] */
  const int32_t* seq_slots;   /* [num_seqs], each slot at most once */
  const int32_t* seq_starts;  /* [num_seqs + 1] */
  const int32_t* sample_rows; /* [num_samples], ascending; several of a sequence if all but its last row are forced */
  const glm_page_update* page_updates;
  const int32_t* forced_tokens; /* [num_samples]; NULL: all are -1 */
  const int32_t* sample_masks;  /* [num_samples], up to num_masks - 1; NULL: all are -1 */
  int32_t num_masks;            /* above 0: the step is held before `sample` until glm_engine_set_masks; at most S */
} glm_step_batch;

typedef struct glm_step_result {
  int32_t num_samples;
  const int32_t* token_ids;  /* [num_samples]; valid until the next collect */
  const float* logprobs;     /* [num_samples]; only where the slot asked */
  const int32_t* top_ids;    /* [num_samples][GLM_MAX_LOGPROBS] */
  const float* top_logprobs; /* [num_samples][GLM_MAX_LOGPROBS] */
  uint64_t device_ns;        /* time from the first op's start to the last op's end */
} glm_step_result;

uint32_t glm_runtime_version(void);

/* Whether the kernel table at `kernels_path` loads and its device `ordinal` answers: opens and closes the device. */
glm_status glm_engine_probe(const char* kernels_path, int32_t ordinal, glm_error* error);

/* Bytes a second that the table's device reads of its memory at best: opens and closes it. `num_threads` as in
 * glm_device_options. */
glm_status glm_engine_read_bandwidth(const char* kernels_path, int32_t ordinal, int32_t num_threads, double* out,
                                     glm_error* error);

glm_status glm_engine_create(const glm_engine_options* options, glm_engine** out, glm_error* error);
/* Waits for steps in flight. NULL is allowed. */
void glm_engine_destroy(glm_engine* engine);
glm_status glm_engine_get_info(const glm_engine* engine, glm_engine_info* out, glm_error* error);

/* Give a free slot to a request: sets its sampling state, no last token (so that no row may ask for it before a step has
 * sampled one) and its token history (prompt tokens, then
 * tokens sampled before, for a request that is resumed; both may be empty where no penalty needs them). In order
 * with submitted steps. */
glm_status glm_engine_bind_slot(glm_engine* engine, int32_t slot, const glm_sampling* sampling, const int32_t* prompt,
                                int32_t num_prompt, const int32_t* sampled, int32_t num_sampled, glm_error* error);
/* Idempotent. The slot's page table is forgotten. */
glm_status glm_engine_release_slot(glm_engine* engine, int32_t slot, glm_error* error);

/* Queue a step; at most GLM_MAX_IN_FLIGHT may be uncollected. GLM_INVALID_ARGUMENT leaves the engine as it was. */
glm_status glm_engine_submit(glm_engine* engine, const glm_step_batch* batch, glm_error* error);
/* The masks of the oldest step that is held for them: [num_masks][ceil(vocab / 32)], copied. Everything before `sample`
 * runs meanwhile, so that masks may depend on the tokens of the step before. GLM_INVALID_ARGUMENT if none is held. */
glm_status glm_engine_set_masks(glm_engine* engine, const uint32_t* masks, glm_error* error);
/* Wait for the oldest uncollected step. GLM_INVALID_ARGUMENT if there is none, or it is held for its masks. */
glm_status glm_engine_collect(glm_engine* engine, glm_step_result* out, glm_error* error);

/* Tokens that experts have been given since create: for each moe_group of the rank's plan, in order, a number for each
 * expert of that rank, by its place; `count` in all. Rows of padding do not count. From any thread. Waits for steps in
 * flight: for now and then, not for every step. */
glm_status glm_engine_expert_loads(glm_engine* engine, int32_t rank, uint64_t* out, size_t count, glm_error* error);

/* From any thread, beside any other call, also while that is stuck. */
glm_status glm_engine_get_progress(const glm_engine* engine, glm_engine_progress* out, glm_error* error);
/* Fail the engine because a step does not end: ranks that wait for others are woken, and collect returns `reason`. A
 * rank that never returns from an op keeps its thread, and destroy waits for that: end the process. */
glm_status glm_engine_abort(glm_engine* engine, const char* reason, glm_error* error);

/* For tests, profiles and the parity tool; the engine must be idle.
 *
 * Copy a plan buffer as the last step left it, `rows` rows tightly packed; or set it. */
glm_status glm_engine_read_buffer(glm_engine* engine, int32_t rank, const char* name, int32_t rows, void* out,
                                  size_t bytes, glm_error* error);
glm_status glm_engine_write_buffer(glm_engine* engine, int32_t rank, const char* name, int32_t rows, const void* data,
                                   size_t bytes, glm_error* error);
/* Run some ops of the batch's plan, by their places in it, in the order given, and wait for them. The list runs
 * `repeats` times, of which device_ns is the shortest; more than once it runs as a graph, where the table has graphs. */
glm_status glm_engine_run_ops(glm_engine* engine, const glm_step_batch* batch, const int32_t* ops, int32_t num_ops,
                              int32_t repeats, glm_step_result* out, glm_error* error);

#ifdef __cplusplus
}
#endif

#endif
