/* Tensor maps: what a tensor copy knows of a matrix in memory. */
#ifndef GLM_CUDA_TENSOR_MAP_H
#define GLM_CUDA_TENSOR_MAP_H

#include <cuda.h>

#include "device.h"

namespace glm::cuda {

/* A matrix of bytes, `stride` from row to row, copied by boxes of 128 columns and `box_rows` rows with 128-byte swizzle; beyond its
 * end there are zeros. data and stride: multiples of 16; rows and columns: at least 1. what: names the matrix in errors. */
glm_status encode_map(glm_device* device, const char* what, CUtensorMap* map, const void* data, int64_t rows,
                      int64_t columns, int64_t stride, int box_rows);

}  // namespace glm::cuda

#endif
