#include "testing.h"

#include "isa.h"

#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

GLM_EXPORT glm_status glm_cpu_set_isa(const char* name) {
  return glm::cpu::set_isa(name) ? GLM_OK : GLM_UNSUPPORTED;
}

GLM_EXPORT void glm_cpu_fp8_encode(const float* in, uint8_t* out, size_t n) {
  glm::cpu::current_isa().fp8_encode(in, out, n);
}

GLM_EXPORT void glm_cpu_fp8_decode(const uint8_t* in, float* out, size_t n) {
  glm::cpu::current_isa().fp8_decode(in, out, n);
}
