#include "launch.h"
#include "ops.h"
#include "row.cuh"

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

}  // namespace

glm_status quantize(glm_device* device, const glm_quantize_args* args) {
  const int32_t cols = args->x.cols;
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(cols), shared_row_bytes(cols)};
  const RowTargets targets{{}, args->q, args->scale};
  return with_act(args->x.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "quantize", grid, quantize_kernel<Act>, args->x, targets);
  });
}

}  // namespace glm::cuda
