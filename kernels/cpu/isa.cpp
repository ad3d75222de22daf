#include "isa.h"

#include <atomic>
#include <cstring>

namespace glm::cpu {

namespace portable {
extern const IsaEntry kIsaEntry;
}
#ifdef GLM_X86
namespace avx2 {
extern const IsaEntry kIsaEntry;
}
#endif
#ifdef GLM_AVX512
namespace avx512 {
extern const IsaEntry kIsaEntry;
}
#endif

namespace {

bool always() {
  return true;
}

#ifdef GLM_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}
#endif

#ifdef GLM_AVX512
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

struct Variant {
  const IsaEntry* entry;
  bool (*supported)();
};

/* Widest first. */
const Variant kVariants[] = {
#ifdef GLM_AVX512
    {&avx512::kIsaEntry, has_avx512},
#endif
#ifdef GLM_X86
    {&avx2::kIsaEntry, has_avx2},
#endif
    {&portable::kIsaEntry, always},
};

const IsaEntry* widest() {
  const Variant* variant = kVariants;
  while (!variant->supported()) ++variant;
  return variant->entry;
}

std::atomic<const IsaEntry*>& current() {
  static std::atomic<const IsaEntry*> entry{widest()};
  return entry;
}

}  // namespace

const IsaEntry& current_isa() {
  return *current().load();
}

bool set_isa(const char* name) {
  for (const Variant& variant : kVariants) {
    if (std::strcmp(variant.entry->name, name) == 0 && variant.supported()) {
      current().store(variant.entry);
      return true;
    }
  }
  return false;
}

}  // namespace glm::cpu
