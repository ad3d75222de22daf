/* Compiled with the program that Futhark wrote, since two things are not in its header: which worker a thread of the
 * CPU is, and the GPU's driver context. */
#include "context.h"

#include "glm_program.c"

#include <stdio.h>

#ifdef GLM_FUTHARK_GPU
/* Futhark ends the process if the GPU cannot be had, so that is found out first. */
static int cannot_start(int32_t ordinal, char* error, size_t error_size) {
  int count = 0;
  CUresult result = cuInit(0);
  if (result == CUDA_SUCCESS) result = cuDeviceGetCount(&count);
  if (result != CUDA_SUCCESS) {
    const char* text = NULL;
    cuGetErrorString(result, &text);
    snprintf(error, error_size, "the CUDA driver does not start: %s", text == NULL ? "unknown error" : text);
    return 1;
  }
  if (ordinal >= 0 && ordinal < count) return 0;
  snprintf(error, error_size, "ordinal is %d; this machine has %d GPUs", ordinal, count);
  return 1;
}
#else
static int cannot_start(int32_t ordinal, char* error, size_t error_size) {
  if (ordinal == 0) return 0;
  snprintf(error, error_size, "ordinal is %d; the CPU is one device, 0", ordinal);
  return 1;
}
#endif

static void configure(struct futhark_context_config* config, int32_t num_threads, int32_t ordinal) {
  (void)config, (void)num_threads, (void)ordinal;
#ifdef GLM_FUTHARK_MULTICORE
  if (num_threads > 0) futhark_context_config_set_num_threads(config, num_threads);
#endif
#ifdef GLM_FUTHARK_GPU
  char name[16];
  snprintf(name, sizeof(name), "#%d", ordinal);
  futhark_context_config_set_device(config, name);
  futhark_context_config_set_unified_memory(config, 0);
  const char* cache = getenv("GLM_FUTHARK_CACHE");
  if (cache != NULL) futhark_context_config_set_cache_file(config, cache);
#endif
}

struct futhark_context* glm_context_open(int32_t num_threads, int32_t ordinal, char* error, size_t error_size) {
  if (cannot_start(ordinal, error, error_size)) return NULL;
  struct futhark_context_config* config = futhark_context_config_new();
  if (config == NULL) {
    snprintf(error, error_size, "no memory for a Futhark context");
    return NULL;
  }
  configure(config, num_threads, ordinal);
  struct futhark_context* context = futhark_context_new(config);
  char* text = context == NULL ? NULL : futhark_context_get_error(context);
  if (context != NULL && text == NULL) return context;
  snprintf(error, error_size, "%s", text == NULL ? "Futhark makes no context" : text);
  free(text);
  if (context != NULL) futhark_context_free(context);
  futhark_context_config_free(config);
  return NULL;
}

void glm_context_close(struct futhark_context* context) {
  struct futhark_context_config* config = context->cfg;
  glm_context_enter(context);
#ifdef GLM_FUTHARK_MULTICORE
  /* An operation that failed leaves tasks that nobody takes, and Futhark waits until its queues are empty. */
  for (int i = 0; i < context->scheduler.num_threads; ++i) context->scheduler.workers[i].q.num_used = 0;
#endif
  futhark_context_free(context);
  futhark_context_config_free(config);
}

void glm_context_enter(struct futhark_context* context) {
#ifdef GLM_FUTHARK_MULTICORE
  worker_local = &context->scheduler.workers[0];
#else
  (void)context;
#endif
}

int glm_context_sync(struct futhark_context* context) {
  return futhark_context_sync(context);
}

char* glm_context_error(struct futhark_context* context) {
  return futhark_context_get_error(context);
}

void* glm_context_driver(struct futhark_context* context) {
#ifdef GLM_FUTHARK_GPU
  return context->cu_ctx;
#else
  (void)context;
  return NULL;
#endif
}
