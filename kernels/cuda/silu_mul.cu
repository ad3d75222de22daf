#include "beside.h"
#include "launch.h"
#include "ops.h"
#include "row.cuh"
#include "whole_row.cuh"

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

__device__ __forceinline__ Packed silu_times(const Packed& gate, const Packed& up) {
  Packed out;
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    const uint32_t word = gate.words[i];
    const uint32_t gated = rounded_pair(silu(low_of(word)), silu(high_of(word)));
    out.words[i] = rounded_pair(low_of(gated) * low_of(up.words[i]), high_of(gated) * high_of(up.words[i]));
  }
  return out;
}

/* The same for whole packs of bf16. */
__global__ void silu_mul_whole_kernel(glm_tensor x, RowTargets targets, bool beside) {
  __shared__ uint32_t largest[kWarp];
  begin_turn(beside);
  const int64_t index = blockIdx.x;
  const int32_t cols = x.cols / 2;
  const bf16* const from = row_of<bf16>(x, index);
  Packed gate;
  Packed up;
  for_each_whole<1>(cols, [&](int, int32_t first) {
    gate = load_packed(from + first);
    up = load_packed(from + cols + first);
  });
  store_whole_row<1>(cols, targets, index, largest, [&](int, int32_t) { return silu_times(gate, up); });
  end_turn(beside);
}

constexpr int kNarrowRows = 8; /* of a block */

/* Rows of at most a pack a lane: a warp a row. */
__global__ void __launch_bounds__(kNarrowRows* kWarp)
    silu_mul_narrow_kernel(glm_tensor x, int32_t rows, RowTargets targets, bool beside) {
  begin_turn(beside);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kNarrowRows + threadIdx.x / kWarp;
  const int32_t cols = x.cols / 2;
  const int32_t first = static_cast<int32_t>(threadIdx.x) % kWarp * kPack;
  if (index < rows) {
    const bool is_used = first < cols;
    const bf16* const from = row_of<bf16>(x, index) + first;
    Packed pack = {};
    if (is_used) pack = silu_times(load_packed(from), load_packed(from + cols));
    if (is_used && targets.out.data != nullptr) store_packed(row_of<bf16>(targets.out, index) + first, pack);
    if (targets.q.data != nullptr) {
      const float scale = warp_row_scale(packed_absmax(0, pack));
      if (first == 0) *row_of<float>(targets.scale, index) = scale;
      if (is_used) Quantizer(scale).store(pack, row_of<fp8>(targets.q, index) + first);
    }
  }
  end_turn(beside);
}

}  // namespace

glm_status silu_mul(glm_device* device, const glm_silu_mul_args* args) {
  if (args->rows == 0) return GLM_OK;
  const int32_t cols = args->x.cols / 2;
  Touched touched;
  touched.reads(args->x, args->rows).writes(args->out, args->rows);
  touched.writes(args->q, args->rows).writes(args->scale, args->rows);
  const Turn turn(device, touched, LineOfCall::Kind::kMayBranch);
  const bool beside = turn.beside() && has_whole_packs(args->x, cols);
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(cols), shared_row_bytes(cols), 1, beside};
  const RowTargets targets{args->out, args->q, args->scale};
  if (args->x.dtype == GLM_BF16 && has_whole_packs(args->x, cols) && takes_whole_rows(targets, cols)) {
    if (grid.threads == kWarp) {
      const Grid narrow{dim3(blocks_for(args->rows, kNarrowRows)), kNarrowRows * kWarp, 0, 1, beside};
      return launch(device, "silu_mul", narrow, silu_mul_narrow_kernel, args->x, args->rows, targets, beside);
    }
    const Grid whole{grid.blocks, grid.threads, 0, 1, beside};
    return launch(device, "silu_mul", whole, silu_mul_whole_kernel, args->x, targets, beside);
  }
  return with_act(args->x.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "silu_mul", grid, silu_mul_kernel<Act>, args->x, targets, beside);
  });
}

}  // namespace glm::cuda
