#include "collective.h"
#include "launch.h"
#include "norm.cuh"

namespace glm::cuda {

namespace {

/* residual += delta, rounded to act; the sum goes to `row`. Returns this thread's sum of squares. */
template <typename Act>
__device__ float add_delta(Act* residual, const Act* delta, int32_t cols, BlockRow& row) {
  float squares = 0.0f;
  for_each_pack(cols, [&](int32_t first) {
    if (first >= cols) return;
    float values[kPack];
    load_pack(residual, first, cols, values);
    if (delta != nullptr) {
      float added[kPack];
      load_pack(delta, first, cols, added);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] += added[i];
      round_pack<Act>(values);
      store_pack(residual, first, cols, values);
    }
    row.write(first, values);
#pragma unroll
    for (int i = 0; i < kPack; ++i) squares = fmaf(values[i], values[i], squares);
  });
  return squares;
}

template <typename Act>
__global__ void rms_norm_kernel(glm_tensor residual, glm_tensor delta, const float* weight, float eps,
                                RowTargets targets) {
  extern __shared__ __align__(16) float row_memory[];
  __shared__ float sums[kWarp];
  __shared__ uint32_t largest[kWarp];
  const int32_t cols = residual.cols;
  NormWeights weights(weight, cols);
  BlockRow row(row_memory, cols);
  begin_kernel();
  const int64_t index = blockIdx.x;
  const Act* added = delta.data == nullptr ? nullptr : row_of<Act>(delta, index);
  const float squares = add_delta(row_of<Act>(residual, index), added, cols, row);
  const float scale = inverse_rms(squares, cols, eps, sums);
  weights.store_normalized<Act>(row, scale, targets, index, largest);
}

/* The same for whole packs of bf16, kEach in a thread. */
template <int kEach>
__global__ void __maxnreg__(48)
    rms_norm_whole_kernel(glm_tensor residual, glm_tensor delta, const float* weight, float eps, RowTargets targets) {
  __shared__ float sums[kWarp];
  __shared__ uint32_t largest[kWarp];
  const int32_t cols = residual.cols;
  const int64_t index = blockIdx.x;
  bf16* const residuals = row_of<bf16>(residual, index);
  const bool adds = delta.data != nullptr;
  const bf16* const added = adds ? row_of<bf16>(delta, index) : residuals; /* no branch between the loads */
  float weights[kEach][kPack];
  for_each_whole<kEach>(cols, [&](int j, int32_t first) { load_whole(weight + first, weights[j]); });
  begin_kernel();
  Packed packs[kEach];
  Packed deltas[kEach];
  for_each_whole<kEach>(cols, [&](int j, int32_t first) {
    packs[j] = load_packed(residuals + first);
    deltas[j] = load_packed(added + first);
  });
  if (adds) {
    for_each_whole<kEach>(cols, [&](int j, int32_t first) {
      add_packed(packs[j], deltas[j]);
      store_packed(residuals + first, packs[j]);
    });
  }
  float squares[kEach] = {};
  for_each_whole<kEach>(cols, [&](int j, int32_t) { squares[j] = sum_of_squares(packs[j]); });
  const float scale = 1.0f / sqrtf(whole_row_sum<kEach>(squares, sums) / static_cast<float>(cols) + eps);
  store_whole_row<kEach>(cols, targets, index, largest,
                         [&](int j, int32_t) { return normalized(packs[j], scale, weights[j]); });
}

}  // namespace

glm_status add_rms_norm(glm_device* device, const glm_rms_norm_args* args) {
  const int32_t cols = args->residual.cols;
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(cols), shared_row_bytes(cols)};
  const RowTargets targets{args->out, args->q, args->scale};
  if (takes_whole_rows(args, targets)) {
    return with_each(args->rows, grid.threads, [&](auto each) {
      const Grid whole{grid.blocks, grid.threads / each(), spreading_bytes(device, args->rows)};
      return launch(device, "rms_norm", whole, rms_norm_whole_kernel<each()>, args->residual, args->delta, args->weight,
                    args->eps, targets);
    });
  }
  return with_act(args->residual.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "rms_norm", grid, rms_norm_kernel<Act>, args->residual, args->delta, args->weight, args->eps,
                  targets);
  });
}

}  // namespace glm::cuda
