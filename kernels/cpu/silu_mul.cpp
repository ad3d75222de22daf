#include "float_math.h"
#include "ops.h"
#include "quantize_row.h"
#include "row_grain.h"
#include "tensor_access.h"
#include "thread_scratch.h"

GLM_CPU_BEGIN

namespace {

int32_t gate_cols(const glm_silu_mul_args& args) {
  return args.x.cols / 2;
}

void silu_mul_row(const glm_silu_mul_args& args, int64_t row, float* x) {
  const glm_dtype act = args.x.dtype;
  const int32_t n = gate_cols(args);
  const float* up = x + n;
  load_floats(row_of(args.x, row), act, x, args.x.cols);
  for (int32_t i = 0; i < n; ++i) x[i] = round_to_act(round_to_act(silu_f32(x[i]), act) * up[i], act);
  if (args.out.data != nullptr) store_act(x, args.out.dtype, row_of(args.out, row), n);
  if (args.q.data != nullptr) {
    quantize_row(x, n, args.scale.cols, static_cast<uint8_t*>(row_of(args.q, row)),
                 static_cast<float*>(row_of(args.scale, row)));
  }
}

}  // namespace

size_t silu_mul_workspace(const glm_device* device, const glm_silu_mul_args* args) {
  return ThreadScratch(device, nullptr, args->x.cols).bytes();
}

glm_status silu_mul(glm_device* device, const glm_silu_mul_args* args) {
  const ThreadScratch scratch(device, device->workspace, args->x.cols);
  parallel_for(device->pool, args->rows, row_grain(args->x.cols), [&](int64_t begin, int64_t end, int thread) {
    for (int64_t row = begin; row < end; ++row) silu_mul_row(*args, row, scratch.of(thread));
  });
  return GLM_OK;
}

GLM_CPU_END
