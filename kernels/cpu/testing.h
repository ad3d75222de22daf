/* What the tests of the CPU table need beyond the table itself. */
#ifndef GLM_CPU_TESTING_H
#define GLM_CPU_TESTING_H

#include <stddef.h>
#include <stdint.h>

#include "glm/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "portable", "avx2" or "avx512": the variant that glm_kernels_query returns from now on. GLM_UNSUPPORTED if this
 * machine or this build lacks it. */
glm_status glm_cpu_set_isa(const char* name);

/* The codec of the variant in use. */
void glm_cpu_fp8_encode(const float* in, uint8_t* out, size_t n);
void glm_cpu_fp8_decode(const uint8_t* in, float* out, size_t n);

#ifdef __cplusplus
}
#endif

#endif
