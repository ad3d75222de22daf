/* Instruction sets. Files compiled once per set live in glm::cpu::<set>, an inline namespace, so that one name means
 * the variant of the object file it stands in, and no inline function built for a newer CPU can be linked into code for
 * an older one. */
#ifndef GLM_CPU_ISA_H
#define GLM_CPU_ISA_H

#include <cstddef>
#include <cstdint>

#include "glm/kernels.h"

namespace glm::cpu {

/* What each instruction set's objects offer to the code that is compiled once. */
struct IsaEntry {
  const char* name;
  const glm_kernels* kernels;
  void (*fp8_encode)(const float* in, uint8_t* out, size_t n);
  void (*fp8_decode)(const uint8_t* in, float* out, size_t n);
};

/* The set in use: the widest this machine has, unless set_isa chose another. */
const IsaEntry& current_isa();

/* False, and nothing changes, if this build or this machine lacks the set. Devices already open keep theirs. */
bool set_isa(const char* name);

}  // namespace glm::cpu

#ifdef GLM_ISA
#define GLM_CPU_BEGIN  \
  namespace glm::cpu { \
  inline namespace GLM_ISA {
#define GLM_CPU_END \
  }                 \
  }
#define GLM_STRINGIFY_(x) #x
#define GLM_STRINGIFY(x) GLM_STRINGIFY_(x)
#endif

#endif
