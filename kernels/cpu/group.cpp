#include "group.h"

#include <cstdio>
#include <new>

#include "device.h"

namespace glm::cpu {

glm_status group_create(glm_device* const* devices, int32_t num_ranks, glm_group** out, char* error,
                        size_t error_size) {
  *out = new (std::nothrow) glm_group{Rendezvous(num_ranks)};
  if (*out == nullptr) {
    std::snprintf(error, error_size, "no memory for a group of %d ranks", num_ranks);
    return GLM_OUT_OF_MEMORY;
  }
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    devices[rank]->group = *out;
    devices[rank]->rank = rank;
  }
  return GLM_OK;
}

void group_abort(glm_group* group) {
  group->meeting.abort();
}

void group_destroy(glm_group* group) {
  delete group;
}

}  // namespace glm::cpu
