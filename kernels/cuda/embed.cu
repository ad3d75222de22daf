#include "launch.h"
#include "ops.h"
#include "row.cuh"

namespace glm::cuda {

namespace {

template <typename Act, typename W>
__global__ void embed_kernel(glm_step_inputs step, const int32_t* last_token, glm_weight table, glm_tensor out) {
  begin_kernel();
  const int64_t row = blockIdx.x;
  const int32_t given = step.token_ids[row];
  const int64_t token = given == -1 ? last_token[step.row_slots[row]] : given;
  const W* from = static_cast<const W*>(table.data) + token * table.stride;
  Act* to = row_of<Act>(out, row);
  for_each_pack(out.cols, [&](int32_t first) {
    if (first >= out.cols) return;
    float values[kPack];
    load_pack(from, first, out.cols, values);
    store_pack(to, first, out.cols, values);
  });
}

}  // namespace

glm_status embed(glm_device* device, const glm_embed_args* args) {
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(args->out.cols)};
  return with_act(args->out.dtype, [&](auto act) {
    return with_weight(args->format, [&](auto weight) {
      using Act = typename decltype(act)::type;
      using W = typename decltype(weight)::type;
      return launch(device, "embed", grid, embed_kernel<Act, W>, *args->step, args->slots->last_token, args->table,
                    args->out);
    });
  });
}

}  // namespace glm::cuda
