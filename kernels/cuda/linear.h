/* The ways a linear layer runs, and how its output channels are cut into tiles. */
#ifndef GLM_CUDA_LINEAR_H
#define GLM_CUDA_LINEAR_H

#include "device.h"
#include "stream_tile.cuh"

namespace glm::cuda {

/* Tiles never straddle two parts. */
struct LinearTiling {
  int channels;                         /* of a tile */
  int first_tile[GLM_MAX_PARTS + 1];    /* of each part, then the number of tiles */
  int first_channel[GLM_MAX_PARTS + 1]; /* of each part in the output, then their number */
};

struct LinearParams {
  int rows;
  int num_parts;
  int k_bytes;
  int split;           /* blocks (one cluster) that share the K of a tile */
  int steps_per_block; /* of kStepBytes */
  bool aligned;        /* rows of x and of the parts start at and last for multiples of 16 bytes */
  LinearTiling tiling;
  glm_tensor x;
  glm_tensor x_scale;
  glm_weight parts[GLM_MAX_PARTS];
  const float* bias[GLM_MAX_PARTS];
  glm_tensor out;
  bool beside; /* on wgmma: runs beside its predecessor */
};

/* Of everything but the K dimension. */
LinearParams linear_params(const glm_linear_args& args, int channels_per_tile);

Touched touched_by(const glm_linear_args& args);

/* On tensor cores: FP8 with FP8, or bf16 with bf16. */
template <Operand kOperand>
glm_status linear_on_tensor_cores(glm_device* device, const glm_linear_args& args);
extern template glm_status linear_on_tensor_cores<Operand::kBf16>(glm_device*, const glm_linear_args&);
extern template glm_status linear_on_tensor_cores<Operand::kFp8Channel>(glm_device*, const glm_linear_args&);
extern template glm_status linear_on_tensor_cores<Operand::kFp8Block>(glm_device*, const glm_linear_args&);

/* The same on Hopper's wgmma. FP8: bf16 output only, as its sums are not as exact as f32. */
template <Operand kOperand>
glm_status linear_on_wgmma(glm_device* device, const glm_linear_args& args);
extern template glm_status linear_on_wgmma<Operand::kBf16>(glm_device*, const glm_linear_args&);
extern template glm_status linear_on_wgmma<Operand::kFp8Channel>(glm_device*, const glm_linear_args&);
extern template glm_status linear_on_wgmma<Operand::kFp8Block>(glm_device*, const glm_linear_args&);

/* On wgmma with the tiles of prefill, for the same bits. is_wide: it can, and it pays. */
bool is_wide(const glm_device* device, const glm_linear_args& args);
glm_status linear_wide(glm_device* device, const glm_linear_args& args);
glm_status linear_wide_split(glm_device* device, const glm_linear_args& args);

/* In f32 arithmetic: every other pair of dtypes. */
glm_status linear_scalar(glm_device* device, const glm_linear_args& args);

}  // namespace glm::cuda

#endif
