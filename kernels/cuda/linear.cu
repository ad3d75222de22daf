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

/* Those of linear_on_wgmma, which take a turn (beside.h). */
bool is_on_decode_tiles(const glm_device* device, const glm_linear_args& args) {
  if (!device->has_wgmma || is_wide(device, args)) return false;
  if (args.format == GLM_W_BF16) return args.x.dtype == GLM_BF16;
  const bool is_fp8 = args.format == GLM_W_FP8_CHANNEL || args.format == GLM_W_FP8_BLOCK;
  return is_fp8 && args.out.dtype == GLM_BF16;
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

Touched touched_by(const glm_linear_args& args) {
  Touched touched;
  return touched.reads(args.x, args.rows).reads(args.x_scale, args.rows).writes(args.out, args.rows);
}

glm_status linear(glm_device* device, const glm_linear_args* args) {
  if (args->rows == 0) return GLM_OK;
  if (is_on_decode_tiles(device, *args)) {
    if (args->format == GLM_W_BF16) return linear_on_wgmma<Operand::kBf16>(device, *args);
    if (args->format == GLM_W_FP8_BLOCK) return linear_on_wgmma<Operand::kFp8Block>(device, *args);
    return linear_on_wgmma<Operand::kFp8Channel>(device, *args);
  }
  const LineOfCall line(device, touched_by(*args), LineOfCall::Kind::kMayBranch);
  if (is_wide(device, *args)) return linear_wide(device, *args);
  switch (args->format) {
    case GLM_W_FP8_CHANNEL:
      return linear_on_tensor_cores<Operand::kFp8Channel>(device, *args);
    case GLM_W_FP8_BLOCK:
      return linear_on_tensor_cores<Operand::kFp8Block>(device, *args);
    case GLM_W_BF16:
      if (args->x.dtype == GLM_BF16) return linear_on_tensor_cores<Operand::kBf16>(device, *args);
      return linear_scalar(device, *args);
    case GLM_W_F32:
    case GLM_W_F16:
      return linear_scalar(device, *args);
  }
  return GLM_INVALID_ARGUMENT;
}

}  // namespace glm::cuda
