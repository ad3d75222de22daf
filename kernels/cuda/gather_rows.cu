#include "launch.h"
#include "ops.h"
#include "row.cuh"

namespace glm::cuda {

namespace {

template <typename Act>
__global__ void gather_rows_kernel(const int32_t* sample_rows, glm_tensor x, glm_tensor out) {
  begin_kernel();
  const Act* from = row_of<Act>(x, sample_rows[blockIdx.x]);
  Act* to = row_of<Act>(out, blockIdx.x);
  for_each_pack(out.cols, [&](int32_t first) {
    if (first >= out.cols) return;
    float values[kPack];
    load_pack(from, first, out.cols, values);
    store_pack(to, first, out.cols, values);
  });
}

}  // namespace

glm_status gather_rows(glm_device* device, const glm_gather_rows_args* args) {
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(args->out.cols)};
  return with_act(args->out.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "gather_rows", grid, gather_rows_kernel<Act>, args->step->sample_rows, args->x, args->out);
  });
}

}  // namespace glm::cuda
