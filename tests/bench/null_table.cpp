// The CPU's kernel table with operations that do nothing: what is left of a step is the executor.
#include <dlfcn.h>

#include "glm/kernels.h"

namespace {

template <class Args>
glm_status nothing(glm_device*, const Args*) {
  return GLM_OK;
}

template <class Args>
void empty(glm_status (*&op)(glm_device*, const Args*)) {
  op = nothing<Args>;
}

glm_kernels make(const glm_kernels& cpu) {
  glm_kernels table = cpu;
  table.name = "null";
  empty(table.embed);
  empty(table.rms_norm);
  empty(table.quantize);
  empty(table.linear);
  empty(table.qk_norm_rope_store);
  empty(table.paged_attention);
  empty(table.silu_mul);
  empty(table.moe_route);
  empty(table.moe_group);
  empty(table.moe_gate_up);
  empty(table.moe_down);
  empty(table.gather_rows);
  empty(table.sample);
  return table;
}

}  // namespace

// CPU_TABLE: the shared object of the CPU's table.
extern "C" const glm_kernels* glm_kernels_query(uint32_t version) {
  void* object = dlopen(CPU_TABLE, RTLD_NOW | RTLD_LOCAL);
  if (object == nullptr) return nullptr;
  const auto query = reinterpret_cast<decltype(&glm_kernels_query)>(dlsym(object, "glm_kernels_query"));
  const glm_kernels* cpu = query == nullptr ? nullptr : query(version);
  if (cpu == nullptr) return nullptr;
  static const glm_kernels table = make(*cpu);
  return &table;
}
