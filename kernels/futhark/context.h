/* A Futhark context and what Futhark's public interface does not say of it. Plain C. */
#ifndef GLM_FUTHARK_CONTEXT_H
#define GLM_FUTHARK_CONTEXT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct futhark_context;

/* NULL: `error` says why. num_threads: of the CPU; ordinal: of the GPU. */
struct futhark_context* glm_context_open(int32_t num_threads, int32_t ordinal, char* error, size_t error_size);
void glm_context_close(struct futhark_context* context);
/* The calling thread will use the context. */
void glm_context_enter(struct futhark_context* context);
/* Non-zero if something that the context ran has failed. */
int glm_context_sync(struct futhark_context* context);
/* Text of the context's last error, to be freed; NULL: none. */
char* glm_context_error(struct futhark_context* context);
/* Of the driver, what the memory is reached through: a CUcontext, or OpenCL's queue; otherwise NULL. */
void* glm_context_driver(struct futhark_context* context);

#ifdef __cplusplus
}
#endif

#endif
