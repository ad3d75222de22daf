#include "launch.h"
#include "ops.h"
#include "row.cuh"
#include "whole_row.cuh"

namespace glm::cuda {

namespace {

template <typename Act>
__global__ void quantize_kernel(glm_tensor x, RowTargets targets) {
  extern __shared__ __align__(16) float row_memory[];
  __shared__ uint32_t largest[kWarp];
  BlockRow row(row_memory, x.cols);
  begin_kernel();
  const int64_t index = blockIdx.x;
  const Act* from = row_of<Act>(x, index);
  store_row<Act>(row, x.cols, targets, index, largest,
                 [&](int32_t first, float* values) { load_pack(from, first, x.cols, values); });
}

template <int kEach>
__global__ void __launch_bounds__(kMaxRowThreads / kEach, 1) quantize_whole_kernel(glm_tensor x, RowTargets targets) {
  __shared__ uint32_t largest[kWarp];
  begin_kernel();
  const int64_t index = blockIdx.x;
  const bf16* const from = row_of<bf16>(x, index);
  Packed packs[kEach];
  for_each_whole<kEach>(x.cols, [&](int j, int32_t first) { packs[j] = load_packed(from + first); });
  store_whole_row<kEach>(x.cols, targets, index, largest, [&](int j, int32_t) { return packs[j]; });
}

}  // namespace

glm_status quantize(glm_device* device, const glm_quantize_args* args) {
  const int32_t cols = args->x.cols;
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(cols), shared_row_bytes(cols)};
  const RowTargets targets{{}, args->q, args->scale};
  if (args->x.dtype == GLM_BF16 && has_whole_packs(args->x, cols) && takes_whole_rows(targets, cols)) {
    return with_each(args->rows, grid.threads, [&](auto each) {
      const Grid whole{grid.blocks, grid.threads / each()};
      return launch(device, "quantize", whole, quantize_whole_kernel<each()>, args->x, targets);
    });
  }
  return with_act(args->x.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "quantize", grid, quantize_kernel<Act>, args->x, targets);
  });
}

}  // namespace glm::cuda
