/* What ops.c, which generate.py writes, uses of the rest of the table. Plain C. */
#ifndef GLM_FUTHARK_BINDING_H
#define GLM_FUTHARK_BINDING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "glm/kernels.h"

#if defined(GLM_FUTHARK_CUDA)
#include <cuda.h>
typedef CUdeviceptr glm_raw_memory;
#elif defined(GLM_FUTHARK_OPENCL)
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
typedef cl_mem glm_raw_memory;
#elif defined(GLM_FUTHARK_HIP)
typedef void* glm_raw_memory;
#else
typedef unsigned char* glm_raw_memory;
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Lengths of arrays of which a call knows only the beginning; nothing reads as far. */
#define GLM_UNBOUNDED (INT64_C(1) << 40)
#define GLM_UNBOUNDED_ROWS (INT64_C(1) << 24)

struct futhark_context;

/* The device's context, made ready for the calling thread. */
struct futhark_context* glm_context(glm_device* device);

/* The caller's memory as Futhark takes it, and never frees it. Zero: no memory. */
#ifdef GLM_FUTHARK_OPENCL
typedef struct glm_span {
  glm_raw_memory memory;
  const void* data;
  size_t bytes;
  bool written;
  bool copied; /* it begins where no sub-buffer can */
} glm_span;

glm_status glm_span_open(glm_device* device, const char* entry, const char* array, const void* data, int64_t bytes,
                         bool written, glm_span* span);
/* The status of the copy back, if there is one, else `status`. */
glm_status glm_span_close(glm_device* device, glm_span* span, glm_status status);
#else
typedef struct glm_span {
  glm_raw_memory memory;
} glm_span;

static inline glm_status glm_span_open(glm_device* device, const char* entry, const char* array, const void* data,
                                       int64_t bytes, bool written, glm_span* span) {
  (void)device, (void)entry, (void)array, (void)bytes, (void)written;
  span->memory = (glm_raw_memory)(uintptr_t)data;
  return GLM_OK;
}

static inline glm_status glm_span_close(glm_device* device, glm_span* span, glm_status status) {
  (void)device, (void)span;
  return status;
}
#endif

/* Status of a call that returned `failed`, its text kept as the device's last error. */
glm_status glm_entry_status(glm_device* device, int failed, const char* entry);
/* Copies what an entry has returned to where the caller wants it, in order with the stream. */
glm_status glm_keep(glm_device* device, glm_raw_memory to, glm_raw_memory from, int64_t bytes);
glm_status glm_not_in_place(glm_device* device, const char* entry, const char* array);
glm_status glm_unsupported(glm_device* device, const char* op, const char* what);

/* Rows of an optional tensor: none where it is absent. */
static inline int64_t glm_rows(const glm_tensor* tensor, int64_t rows) {
  return tensor->data == NULL ? 0 : rows;
}

/* Columns that share a scale. */
static inline int64_t glm_group_of(const glm_tensor* scale, int64_t cols) {
  return scale->cols > 1 ? GLM_FP8_BLOCK : cols;
}

static inline int64_t glm_blocks(int64_t rows) {
  return (rows + GLM_FP8_BLOCK - 1) / GLM_FP8_BLOCK;
}

/* Where part p of a linear's output begins. */
static inline void* glm_part_of(const glm_linear_args* a, int32_t p) {
  size_t column = 0;
  for (int32_t i = 0; i < p; ++i) column += (size_t)a->parts[i].rows;
  return (char*)a->out.data + column * (a->out.dtype == GLM_F32 ? 4 : 2);
}

/* Experts that lie anywhere in the device's address space, as one array that begins at the first of them. */
typedef struct glm_experts {
  const void* base;
  const void* scale;
  int64_t* at;       /* [count], on the host: element at which each expert begins */
  int64_t* scale_at; /* [count], on the host */
  int64_t stride;
  int64_t scale_stride;
} glm_experts;

glm_status glm_experts_open(glm_device* device, const glm_expert_weights* weights, glm_experts* out);
void glm_experts_close(glm_experts* experts);

typedef struct glm_update_pages_args {
  int32_t rows;
  const glm_slots* slots;
  const glm_page_update* updates;
} glm_update_pages_args;

glm_status glm_futhark_update_pages(glm_device*, const glm_update_pages_args*);
glm_status glm_futhark_embed(glm_device*, const glm_embed_args*);
glm_status glm_futhark_rms_norm(glm_device*, const glm_rms_norm_args*);
glm_status glm_futhark_quantize(glm_device*, const glm_quantize_args*);
glm_status glm_futhark_linear(glm_device*, const glm_linear_args*);
glm_status glm_futhark_qk_norm_rope_store(glm_device*, const glm_qk_norm_rope_store_args*);
glm_status glm_futhark_paged_attention(glm_device*, const glm_paged_attention_args*);
glm_status glm_futhark_silu_mul(glm_device*, const glm_silu_mul_args*);
glm_status glm_futhark_moe_route(glm_device*, const glm_moe_route_args*);
glm_status glm_futhark_moe_group(glm_device*, const glm_moe_group_args*);
glm_status glm_futhark_moe_gate_up(glm_device*, const glm_moe_gate_up_args*);
glm_status glm_futhark_moe_down(glm_device*, const glm_moe_down_args*);
glm_status glm_futhark_gather_rows(glm_device*, const glm_gather_rows_args*);
glm_status glm_futhark_sample(glm_device*, const glm_sample_args*);

#ifdef __cplusplus
}
#endif

#endif
