/* What the host is in, for profilers (NVTX: nothing happens unless one is attached). */
#include <nvtx3/nvToolsExt.h>

#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

GLM_EXPORT void glm_cuda_range_begin(const char* label) {
  nvtxRangePushA(label);
}

GLM_EXPORT void glm_cuda_range_end() {
  nvtxRangePop();
}
