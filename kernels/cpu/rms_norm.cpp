#include "norm_row.h"
#include "ops.h"
#include "quantize_row.h"
#include "row_grain.h"
#include "tensor_access.h"
#include "thread_scratch.h"

GLM_CPU_BEGIN

namespace {

/* x = act(residual + delta), written back. */
void add_delta(const glm_rms_norm_args& args, int64_t row, float* x, float* delta) {
  const glm_dtype act = args.residual.dtype;
  const int32_t cols = args.residual.cols;
  load_floats(row_of(args.delta, row), args.delta.dtype, delta, cols);
  for (int32_t i = 0; i < cols; ++i) x[i] = round_to_act(x[i] + delta[i], act);
  store_act(x, act, row_of(args.residual, row), cols);
}

void norm(const glm_rms_norm_args& args, int64_t row, float* x, float* delta) {
  const glm_dtype act = args.residual.dtype;
  const int32_t cols = args.residual.cols;
  load_floats(row_of(args.residual, row), act, x, cols);
  if (args.delta.data != nullptr) add_delta(args, row, x, delta);
  normalize_row(x, args.weight, cols, args.eps, act, x);
  if (args.out.data != nullptr) store_act(x, args.out.dtype, row_of(args.out, row), cols);
  if (args.q.data != nullptr) {
    quantize_row(x, cols, args.scale.cols, static_cast<uint8_t*>(row_of(args.q, row)),
                 static_cast<float*>(row_of(args.scale, row)));
  }
}

}  // namespace

size_t rms_norm_workspace(const glm_device* device, const glm_rms_norm_args* args) {
  return ThreadScratch(device, nullptr, 2 * int64_t{args->residual.cols}).bytes();
}

glm_status rms_norm(glm_device* device, const glm_rms_norm_args* args) {
  if (args->reduce != 0) {
    const glm_all_reduce_args sum{args->rows, args->delta};
    if (const glm_status status = all_reduce(device, &sum); status != GLM_OK) return status;
  }
  const int32_t cols = args->residual.cols;
  const ThreadScratch scratch(device, device->workspace, 2 * int64_t{cols});
  parallel_for(device->pool, args->rows, row_grain(cols), [&](int64_t begin, int64_t end, int thread) {
    float* x = scratch.of(thread);
    for (int64_t row = begin; row < end; ++row) norm(*args, row, x, x + cols);
  });
  return GLM_OK;
}

GLM_CPU_END
