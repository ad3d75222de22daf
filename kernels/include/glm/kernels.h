/* The kernel table: every operation that a plan may name (ops.h), as a plain C contract.
 *
 * A table (cpu, cuda, ...) is one shared object that exports glm_kernels_query. The caller asks for
 * GLM_KERNELS_VERSION and gets the table or NULL. An operation that a table lacks is NULL in it; the runtime lists all
 * that a plan needs and the table lacks before anything runs.
 *
 * Rules that hold for every operation
 *  - Arguments are checked by the runtime when the plan is bound, not by the kernel. `rows` may be 0: nothing is
 *    written.
 *  - No operation allocates, and none keeps a pointer after it returns (cpu) or after the stream has passed it (cuda).
 *  - Row independence: what is written for a row depends on that row's inputs (and, for attention, on the earlier keys
 *    of its own sequence) and on nothing else in the batch: not on `rows`, not on the row's index. Reduction orders
 *    are fixed.
 *  - Outputs do not alias inputs except where an operation says "in place".
 *  - Activations ("act") are f32 or bf16, one dtype for a whole plan; arithmetic is in f32; a store to bf16 rounds to
 *    nearest even.
 *  - FP8 is E4M3 (OCP "fn": bias 7, no infinity, 0x7f and 0xff are NaN, largest finite 448). Encoding rounds to
 *    nearest even and saturates finite and infinite values to +-448; NaN encodes to NaN (0x7f with the sign).
 *  - Matrices are row-major; `stride` counts elements from one row to the next. Data is aligned to 64 bytes for
 *    buffers and to at least the element for checkpoint tensors (weights lie where the file has them).
 *  - Everything that an args struct points to is in device memory, but for `step` and `slots`: those two structs are
 *    the host's and read during the call, the arrays that they point to are the device's.
 *  - Between graph_begin and graph_end an operation is recorded with its arguments and the counts in `step`.
 *  - A step's unused rows may all be rows of one spare slot, at position 0 of one page: they write the same there.
 */
#ifndef GLM_KERNELS_H
#define GLM_KERNELS_H

#include "glm/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GLM_KERNELS_VERSION 4u
#define GLM_MAX_RANKS 64 /* devices of a group */

typedef struct glm_device glm_device; /* opaque: threads or a GPU, owned by the table */
typedef struct glm_event glm_event;   /* opaque: a mark in the device's stream */
typedef struct glm_graph glm_graph;   /* opaque: recorded operations */
typedef struct glm_group glm_group;   /* opaque: what the devices of all ranks exchange data through */

/* Bits of glm_kernels.flags. */
#define GLM_TABLE_HOST_MEMORY \
  1u /* device memory is the host's: it may be read and written, and weights used in place */

typedef struct glm_device_options {
  int32_t ordinal;     /* GPU index; 0 for the CPU */
  int32_t num_threads; /* CPU: worker threads including the caller; 0: one per core this process may use */
} glm_device_options;

typedef struct glm_kernels {
  uint32_t version; /* GLM_KERNELS_VERSION */
  const char* name; /* "cpu" */
  uint32_t flags;   /* GLM_TABLE_* */

  /* A device and its one in-order stream. On failure *out is NULL and `error` (capacity error_size) says what is
   * missing. */
  glm_status (*device_open)(const glm_device_options* options, glm_device** out, char* error, size_t error_size);
  void (*device_close)(glm_device* device);
  /* "cpu avx2, 2 threads": for logs and GetInfo; valid while the device is open. */
  const char* (*device_description)(const glm_device* device);
  /* Bytes of scratch that `op` needs with these args and rows at their maximum. The runtime gives the device one
   * block as large as the largest answer, before the first operation. */
  size_t (*workspace_bytes)(const glm_device* device, glm_op op, const void* args);
  void (*set_workspace)(glm_device* device, void* data, size_t bytes);
  /* Text of the calling thread's last failed call; empty if none failed. Valid until that thread's next call. */
  const char* (*last_error)(const glm_device* device);

  /* Memory. Every table has these. Bytes of device memory that are free now, and in all. */
  glm_status (*memory_info)(glm_device* device, size_t* free_bytes, size_t* total_bytes);
  /* Device memory aligned to 256 bytes, its contents undefined. GLM_OUT_OF_MEMORY leaves *out NULL. */
  glm_status (*memory_alloc)(glm_device* device, size_t bytes, void** out);
  glm_status (*memory_free)(glm_device* device, void* data);
  /* Host memory, aligned to 64 bytes, that copies reach directly (page-locked for a GPU). */
  glm_status (*host_alloc)(glm_device* device, size_t bytes, void** out);
  glm_status (*host_free)(glm_device* device, void* data);

  /* The stream. Every table has these; they, the operations and graph calls are ordered as they are called, and come
   * from one thread at a time. A host range must stay as it is until the stream has passed the copy; only copies from
   * and to host_alloc's memory never wait for the stream. */
  glm_status (*copy_in)(glm_device* device, void* device_data, const void* host_data, size_t bytes);
  glm_status (*copy_out)(glm_device* device, void* host_data, const void* device_data, size_t bytes);
  glm_status (*fill)(glm_device* device, void* device_data, uint8_t byte, size_t bytes);
  /* slots->page_table[slot][index] = page for each update; two for one entry agree. `updates` is in device memory. */
  glm_status (*update_pages)(glm_device* device, const glm_slots* slots, const glm_page_update* updates, int32_t count);
  /* Waits until everything submitted so far has run; reports a fault of any of it. */
  glm_status (*synchronize)(glm_device* device);

  /* Events. Every table has these. wait and elapsed may be called from any thread, beside any other call. */
  glm_status (*event_create)(glm_device* device, glm_event** out);
  void (*event_destroy)(glm_device* device, glm_event* event);
  glm_status (*event_record)(glm_device* device, glm_event* event);
  /* Until the stream has passed the event's newest record (at once if it has none); reports a fault before it. */
  glm_status (*event_wait)(glm_device* device, glm_event* event);
  /* Between the records of two events that the stream has passed. */
  glm_status (*event_elapsed)(glm_device* device, glm_event* from, glm_event* to, uint64_t* nanoseconds);

  /* Graphs: all four, or NULL in a table that has none. What is called between begin and end is recorded and does not
   * run; launch runs it in the stream. */
  glm_status (*graph_begin)(glm_device* device);
  glm_status (*graph_end)(glm_device* device, glm_graph** out);
  glm_status (*graph_launch)(glm_device* device, glm_graph* graph);
  void (*graph_free)(glm_device* device, glm_graph* graph);

  /* Groups: all three, or NULL in a table that has none. The devices of all ranks of an engine, rank i being
   * devices[i], which then exchange data: see exchange.h. Each is called by its own thread; all call
   * the same operations in the same order with the same rows. Made before an operation is called or a workspace asked
   * for, destroyed when all streams are idle. */
  glm_status (*group_create)(glm_device* const* devices, int32_t num_ranks, glm_group** out, char* error,
                             size_t error_size);
  /* From any thread, more than once: exchanges in progress and to come fail with GLM_DEVICE_ERROR instead of waiting. */
  void (*group_abort)(glm_group* group);
  void (*group_destroy)(glm_group* group);

  glm_status (*embed)(glm_device*, const glm_embed_args*);
  glm_status (*rms_norm)(glm_device*, const glm_rms_norm_args*);
  glm_status (*quantize)(glm_device*, const glm_quantize_args*);
  glm_status (*linear)(glm_device*, const glm_linear_args*);
  glm_status (*qk_norm_rope_store)(glm_device*, const glm_qk_norm_rope_store_args*);
  glm_status (*paged_attention)(glm_device*, const glm_paged_attention_args*);
  glm_status (*silu_mul)(glm_device*, const glm_silu_mul_args*);
  glm_status (*moe_route)(glm_device*, const glm_moe_route_args*);
  glm_status (*moe_group)(glm_device*, const glm_moe_group_args*);
  glm_status (*moe_gate_up)(glm_device*, const glm_moe_gate_up_args*);
  glm_status (*moe_down)(glm_device*, const glm_moe_down_args*);
  glm_status (*all_reduce)(glm_device*, const glm_all_reduce_args*);
  glm_status (*gather_rows)(glm_device*, const glm_gather_rows_args*);
  glm_status (*sample)(glm_device*, const glm_sample_args*);
  glm_status (*reduce_scatter)(glm_device*, const glm_reduce_scatter_args*);
  glm_status (*all_gather)(glm_device*, const glm_all_gather_args*);
  glm_status (*moe_dispatch)(glm_device*, const glm_moe_dispatch_args*);
  glm_status (*moe_down_each)(glm_device*, const glm_moe_down_each_args*);
  glm_status (*moe_combine)(glm_device*, const glm_moe_combine_args*);

  /* From any thread: how many exchanges each rank's stream has begun since the group was made, [num_ranks]. NULL in a
   * table whose operations have ended when they return. */
  void (*group_progress)(glm_group* group, uint64_t* begun);
} glm_kernels;

/* The table, or NULL if this object does not speak `version`. */
const glm_kernels* glm_kernels_query(uint32_t version);

#ifdef __cplusplus
}
#endif

#endif
