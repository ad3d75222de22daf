#include "linear.h"
#include "ops.h"

namespace glm::cuda {

namespace {

LinearTiling tile_channels(const glm_linear_args& args, int channels) {
  LinearTiling tiling = {};
  tiling.channels = channels;
  for (int i = 0; i < args.num_parts; ++i) {
    tiling.first_tile[i + 1] = tiling.first_tile[i] + (args.parts[i].rows + channels - 1) / channels;
    tiling.first_channel[i + 1] = tiling.first_channel[i] + args.parts[i].rows;
  }
  return tiling;
}

}  // namespace

LinearParams linear_params(const glm_linear_args& args, int channels_per_tile) {
  LinearParams p = {};
  p.rows = args.rows;
  p.num_parts = args.num_parts;
  p.tiling = tile_channels(args, channels_per_tile);
  p.x = args.x;
  p.x_scale = args.x_scale;
  for (int i = 0; i < args.num_parts; ++i) {
    p.parts[i] = args.parts[i];
    p.bias[i] = args.bias[i];
  }
  p.out = args.out;
  return p;
}

glm_status linear(glm_device* device, const glm_linear_args* args) {
  if (args->rows == 0) return GLM_OK;
  if (is_wide(device, *args)) return linear_wide(device, *args);
  const bool fp8_on_wgmma = device->has_wgmma && args->out.dtype == GLM_BF16;
  switch (args->format) {
    case GLM_W_FP8_CHANNEL:
      return fp8_on_wgmma ? linear_on_wgmma<Operand::kFp8Channel>(device, *args)
                          : linear_on_tensor_cores<Operand::kFp8Channel>(device, *args);
    case GLM_W_FP8_BLOCK:
      return fp8_on_wgmma ? linear_on_wgmma<Operand::kFp8Block>(device, *args)
                          : linear_on_tensor_cores<Operand::kFp8Block>(device, *args);
    case GLM_W_BF16:
      if (args->x.dtype != GLM_BF16) return linear_scalar(device, *args);
      return device->has_wgmma ? linear_on_wgmma<Operand::kBf16>(device, *args)
                               : linear_on_tensor_cores<Operand::kBf16>(device, *args);
    case GLM_W_F32:
    case GLM_W_F16:
      return linear_scalar(device, *args);
  }
  return GLM_INVALID_ARGUMENT;
}

}  // namespace glm::cuda
