#ifndef GLM_CUDA_DEVICE_H
#define GLM_CUDA_DEVICE_H

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "branch.h"
#include "glm/kernels.h"
#include "peers.h"
#include "touched.h"

namespace glm::cuda {
struct Nccl;
}

/* One GPU, its stream, and that of a graph's branch. `last_error` holds the text of the calling thread's last failed CUDA call. */
struct glm_device {
  int ordinal = 0;
  int sm_count = 0;
  bool has_wgmma = false; /* compute capability 9.0 */
  cudaStream_t stream = nullptr;
  std::string description;
  static inline thread_local std::string last_error;
  std::byte* workspace = nullptr;
  size_t workspace_bytes = 0;
  uint64_t launches = 0;        /* of kernels, but for a branch's */
  bool launched_beside = false; /* the last kernel runs beside its predecessor */
  glm::cuda::Branch branch;
  glm::cuda::LastTurn last_turn;
  glm::cuda::LastGrouping last_grouping;
  /* Of the grouping that moe_gate_up has waited for before its successor could start: what follows may read these offsets before
   * its predecessor ends. Else NULL. */
  const int32_t* settled_offsets = nullptr;
  /* `launches` when qk_norm_rope_store last followed an operation that leaves room beside itself (beside.h), else 0. That operation waited
   * before it released its successor, so what comes next starts when all before that operation has ended: all earlier steps' keys and
   * values are there, and this step's inputs. */
  uint64_t settled_launches = 0;
  glm::cuda::Peers peers; /* of its group */
  /* Where GPUs do not reach each other's memory: else NULL. */
  const glm::cuda::Nccl* nccl = nullptr;
  void* communicator = nullptr;
};

namespace glm::cuda {

glm_status device_open(const glm_device_options* options, glm_device** out, char* error, size_t error_size);
void device_close(glm_device* device);
const char* device_description(const glm_device* device);
void set_workspace(glm_device* device, void* data, size_t bytes);

/* GLM_OK, or the status of a failed CUDA call, whose name and text it leaves in last_error. */
glm_status check(glm_device* device, cudaError_t result, const char* what);

}  // namespace glm::cuda

#endif
