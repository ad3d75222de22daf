/* NCCL, loaded when a group needs it: where GPUs do not reach each other's memory. */
#ifndef GLM_CUDA_NCCL_H
#define GLM_CUDA_NCCL_H

#include <cuda_runtime_api.h>

#include <string>

#include "device.h"

namespace glm::cuda {

/* The functions of nccl.h that are called, by their names there. Results are ncclResult_t: 0 is success. */
struct Nccl {
  int (*GetVersion)(int* version);
  int (*CommInitAll)(void** communicators, int count, const int* ordinals);
  int (*CommAbort)(void* communicator);
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*Send)(const void* data, size_t count, int type, int peer, void* communicator, cudaStream_t stream);
  int (*Recv)(void* data, size_t count, int type, int peer, void* communicator, cudaStream_t stream);
  int (*AllGather)(const void* from, void* to, size_t count, int type, void* communicator, cudaStream_t stream);
  const char* (*GetErrorString)(int result);
};

/* NULL, with what is missing in `error`, if this machine has no NCCL. */
const Nccl* load_nccl(std::string* error);

glm_status check_nccl(glm_device* device, int result, const char* what);
/* Of a group of calls: bytes to or from a rank. Nothing is called for no bytes. */
int send_bytes(const glm_device* device, const void* data, size_t bytes, int peer);
int receive_bytes(const glm_device* device, void* data, size_t bytes, int peer);

/* The sum over the ranks as all_reduce states it: parts are sent to the rank that adds them up, in order of rank, and sums are gathered. */
glm_status all_reduce_nccl(glm_device* device, const glm_tensor& x, int32_t rows);
size_t all_reduce_nccl_workspace(const glm_device* device, const glm_tensor& x, int32_t rows);

}  // namespace glm::cuda

#endif
