/* A compiled driver: the two plans of one rank as straight-line calls into a kernel table, in a shared object that
 * exports glm_driver_query. The runtime keeps memory, weights, streams, graphs and communicators; a driver takes over
 * what the built-in executor does in a step, and nothing else. native/terra makes them.
 *
 * What a plan's text says is a constant of its driver. What only loading decides (addresses, strides of weights, the
 * spare slot) comes from the ops as the runtime has bound them, once, at start; there each constant is held against them
 * as well, so that a driver of another plan never runs.
 *
 * A driver keeps no state but in the context that the caller gives it, and allocates nothing.
 */
#ifndef GLM_DRIVER_H
#define GLM_DRIVER_H

#include "glm/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GLM_DRIVER_VERSION 1u

/* An op as the runtime has bound it. */
typedef struct glm_driver_op {
  glm_op kind;
  const void* args; /* glm_<kind>_args; read during start only */
  const void* id;   /* what the mark says from the op's call on */
} glm_driver_op;

/* Where the calling thread is, for other threads to see. Both are written before an op is called. */
typedef struct glm_driver_mark {
  const void* op; /* the id */
  uint64_t calls; /* begun so far */
} glm_driver_mark;

/* All that it points to outlives the context. */
typedef struct glm_driver_binding {
  const glm_kernels* kernels;
  glm_device* device;
  glm_driver_mark* mark;
  const glm_driver_op* ops; /* [num_ops], in the plan's order */
  int32_t num_ops;
  int32_t rank; /* of num_ranks */
  int32_t num_ranks;
  int32_t max_rows;    /* T, as the driver's debug build checks it */
  int32_t max_samples; /* S, likewise */
} glm_driver_binding;

/* What is wrong with a binding, or, in a debug build, with a call. */
typedef struct glm_driver_fault {
  int32_t op;       /* its place in the plan; -1: no op's */
  const char* what; /* the field that differs ("x.cols"), or the check that failed; NULL: nothing */
} glm_driver_fault;

/* One plan. `context` is context_bytes of memory aligned to 64, used by one thread at a time. */
typedef struct glm_driver_plan {
  int32_t num_ops;
  size_t context_bytes;
  /* GLM_INVALID_ARGUMENT with `fault` if the binding is not of this plan. */
  glm_status (*start)(void* context, const glm_driver_binding* binding, glm_driver_fault* fault);
  /* The ops before `sample`, or it and what comes after. The first status that is not GLM_OK ends the call: the mark then
   * says whose it is. A debug build says in `fault` what it found wrong before that op was called, with GLM_INTERNAL. */
  glm_status (*forward)(void* context, int32_t num_rows, int32_t num_samples, glm_driver_fault* fault);
  glm_status (*sample)(void* context, int32_t num_rows, int32_t num_samples, glm_driver_fault* fault);
  /* Forgets the binding. */
  void (*stop)(void* context);
} glm_driver_plan;

typedef struct glm_driver {
  uint32_t version;         /* GLM_DRIVER_VERSION */
  uint32_t kernels_version; /* GLM_KERNELS_VERSION */
  const char* compiler;     /* "terra 1.2.0" */
  int32_t debug;            /* 1: with the checks of a debug build */
  glm_driver_plan mixed;
  glm_driver_plan decode;
} glm_driver;

/* The driver, or NULL if this object does not speak `version`. */
const glm_driver* glm_driver_query(uint32_t version);

#ifdef __cplusplus
}
#endif

#endif
