/* The devices of all ranks of one engine. Their data meet in shared memory. */
#ifndef GLM_CPU_GROUP_H
#define GLM_CPU_GROUP_H

#include <cstddef>

#include "glm/kernels.h"
#include "rendezvous.h"

struct glm_group {
  glm::cpu::Rendezvous meeting;
};

namespace glm::cpu {

glm_status group_create(glm_device* const* devices, int32_t num_ranks, glm_group** out, char* error, size_t error_size);
void group_abort(glm_group* group);
void group_destroy(glm_group* group);

}  // namespace glm::cpu

#endif
