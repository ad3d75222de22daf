/* Sums over the ranks of a device's group: which way a message goes. Every way gives the same bits. */
#ifndef GLM_CUDA_COLLECTIVE_H
#define GLM_CUDA_COLLECTIVE_H

#include "device.h"

namespace glm::cuda {

enum class ReducePath : int32_t {
  kBySize = 0,   /* of those below */
  kOneShot = 1,  /* every rank sends all rows to all */
  kTwoShots = 2, /* to the rank that adds a row up, which sends the sum */
  kInPlace = 3,  /* every rank reads its part of all ranks' tensors, and writes the sums there */
  kNccl = 4      /* the only way for larger messages where GPUs do not reach each other's memory */
};

/* Never kBySize. */
ReducePath reduce_path(const glm_device* device, glm_dtype act, int32_t rows, int32_t cols);

/* GLM_DEVICE_ERROR, and its text, if the group of the device is aborted. */
glm_status check_group(const glm_device* device);

/* Of an all_reduce, on the path of its size. */
size_t sum_workspace(const glm_device* device, const glm_tensor& x, int32_t rows);
/* By kInPlace or kNccl. */
glm_status sum_large(glm_device* device, const glm_tensor& x, int32_t rows, ReducePath path);
glm_status all_reduce_in_place(glm_device* device, const glm_tensor& x, int32_t rows);
/* rms_norm without `reduce`. */
glm_status add_rms_norm(glm_device* device, const glm_rms_norm_args* args);

}  // namespace glm::cuda

#endif
