/* The devices of all ranks of one engine. */
#ifndef GLM_CUDA_GROUP_H
#define GLM_CUDA_GROUP_H

#include <vector>

#include "device.h"

struct glm_group {
  std::vector<glm_device*> devices; /* by rank */
  std::vector<void*> blocks;        /* ExchangeLayout, on each rank's GPU */
  uint32_t* aborted = nullptr;      /* in host memory that every GPU reads */
};

namespace glm::cuda {

glm_status group_create(glm_device* const* devices, int32_t num_ranks, glm_group** out, char* error, size_t error_size);
void group_abort(glm_group* group);
void group_destroy(glm_group* group);

}  // namespace glm::cuda

#endif
