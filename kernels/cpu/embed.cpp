#include <algorithm>

#include "device.h"
#include "ops.h"
#include "row_grain.h"
#include "tensor_access.h"

GLM_CPU_BEGIN

namespace {

constexpr int32_t kBlock = 512;

glm_dtype dtype_of(glm_weight_format format) {
  if (format == GLM_W_BF16) return GLM_BF16;
  return format == GLM_W_F16 ? GLM_F16 : GLM_F32;
}

int32_t token_of(const glm_embed_args& args, int64_t row) {
  const int32_t given = args.step->token_ids[row];
  return given == -1 ? args.slots->last_token[args.step->row_slots[row]] : given;
}

void embed_row(const glm_embed_args& args, int64_t row) {
  const glm_dtype dtype = dtype_of(args.format);
  const auto in_bytes = static_cast<int64_t>(dtype_bytes(dtype));
  const auto out_bytes = static_cast<int64_t>(dtype_bytes(args.out.dtype));
  const auto* in = static_cast<const std::byte*>(args.table.data) + token_of(args, row) * args.table.stride * in_bytes;
  auto* out = static_cast<std::byte*>(row_of(args.out, row));
  float block[kBlock];
  for (int32_t col = 0; col < args.out.cols; col += kBlock) {
    const int32_t n = std::min(kBlock, args.out.cols - col);
    load_floats(in + col * in_bytes, dtype, block, n);
    store_act(block, args.out.dtype, out + col * out_bytes, n);
  }
}

}  // namespace

glm_status embed(glm_device* device, const glm_embed_args* args) {
  parallel_for(device->pool, args->rows, row_grain(args->out.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) embed_row(*args, row);
  });
  return GLM_OK;
}

GLM_CPU_END
