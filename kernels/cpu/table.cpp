#include "isa.h"

extern "C" __attribute__((visibility("default"))) const glm_kernels* glm_kernels_query(uint32_t version) {
  return version == GLM_KERNELS_VERSION ? glm::cpu::current_isa().kernels : nullptr;
}
