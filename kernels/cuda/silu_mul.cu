#include "beside.h"
#include "launch.h"
#include "ops.h"
#include "row.cuh"

namespace glm::cuda {

namespace {

template <typename Act>
__global__ void silu_mul_kernel(glm_tensor x, RowTargets targets, bool beside) {
  extern __shared__ __align__(16) float row_memory[];
  __shared__ uint32_t largest[kWarp];
  begin_turn(beside);
  const int64_t index = blockIdx.x;
  const int32_t cols = x.cols / 2;
  BlockRow row(row_memory, cols);
  const Act* gate = row_of<Act>(x, index);
  const Act* up = gate + cols;
  store_row<Act>(row, cols, targets, index, largest, [&](int32_t first, float* values) {
    float g[kPack];
    float u[kPack];
    if (beside) {
      load_pack_past_l1(gate + first, g);
      load_pack_past_l1(up + first, u);
    } else {
      load_pack(gate, first, cols, g);
      load_pack(up, first, cols, u);
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = silu(g[i]);
    round_pack<Act>(values);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] *= u[i];
    round_pack<Act>(values);
  });
  end_turn(beside);
}

/* Whether gate and up of all rows are read in aligned packs: past the L1. */
bool has_whole_packs(const glm_tensor& x, int32_t cols) {
  const size_t element = bytes_of(x.dtype);
  return cols % kPack == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride * element % 16 == 0;
}

}  // namespace

glm_status silu_mul(glm_device* device, const glm_silu_mul_args* args) {
  if (args->rows == 0) return GLM_OK;
  const int32_t cols = args->x.cols / 2;
  Touched touched;
  touched.reads(args->x, args->rows).writes(args->out, args->rows);
  touched.writes(args->q, args->rows).writes(args->scale, args->rows);
  const Turn turn(device, touched);
  const bool beside = turn.beside() && has_whole_packs(args->x, cols);
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(cols), shared_row_bytes(cols), 1, beside};
  const RowTargets targets{args->out, args->q, args->scale};
  return with_act(args->x.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "silu_mul", grid, silu_mul_kernel<Act>, args->x, targets, beside);
  });
}

}  // namespace glm::cuda
