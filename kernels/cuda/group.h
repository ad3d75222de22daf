/* The devices of all ranks of one engine. */
#ifndef GLM_CUDA_GROUP_H
#define GLM_CUDA_GROUP_H

#include <atomic>
#include <vector>

#include "device.h"
#include "nccl.h"

namespace glm::cuda {

/* In host memory that every GPU reaches. */
struct Board {
  uint32_t aborted;
  uint64_t begun[kMaxPeers]; /* exchanges, by rank */
};

}  // namespace glm::cuda

struct glm_group {
  std::vector<glm_device*> devices; /* by rank */
  std::vector<void*> blocks;        /* ExchangeLayout, of each rank */
  glm::cuda::Board* board = nullptr;
  std::atomic_flag abort_begun;
  /* Where GPUs do not reach each other's memory: then the blocks are in host memory. */
  const glm::cuda::Nccl* nccl = nullptr;
  std::vector<void*> communicators;
};

namespace glm::cuda {

glm_status group_create(glm_device* const* devices, int32_t num_ranks, glm_group** out, char* error, size_t error_size);
void group_abort(glm_group* group);
void group_destroy(glm_group* group);
void group_progress(glm_group* group, uint64_t* begun);

}  // namespace glm::cuda

#endif
