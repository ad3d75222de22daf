/* rms_norm whose delta is summed over the ranks on the way. */
#include "collective.h"
#include "launch.h"
#include "norm.cuh"
#include "ops.h"
#include "peer_rows.cuh"

namespace glm::cuda {

namespace {

/* residual += the sum of all ranks' delta, rounded to act; that goes to the shared row. Returns this thread's sum of squares. */
template <typename Act>
__device__ float add_sum(const Peers& peers, PeerRows<Act>& exchange, Act* residual, const Act* delta, int32_t cols,
                         BlockRow& row) {
  const int64_t index = blockIdx.x;
  float sum[kPack];
  for_each_pack(cols, [&](int32_t first) {
    if (first >= cols) return;
    load_pack(delta, first, cols, sum);
    exchange.send(index, first, sum);
  });
  if (index == 0 && threadIdx.x == 0) count_exchange(peers);
  float squares = 0.0f;
  for_each_pack(cols, [&](int32_t first) {
    if (first >= cols) return;
    float values[kPack];
    load_pack(residual, first, cols, values);
    load_pack(delta, first, cols, sum);
    exchange.sum(index, first, sum);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      values[i] = rounded_to<Act>(values[i] + sum[i]);
      squares = fmaf(values[i], values[i], squares);
    }
    row.write(first, values);
    store_pack(residual, first, cols, values);
  });
  return squares;
}

template <typename Act>
__global__ void __launch_bounds__(kMaxRowThreads)
    reduce_rms_norm_kernel(const __grid_constant__ Peers peers, glm_tensor residual, glm_tensor delta,
                           const float* weight, float eps, RowTargets targets, bool two_shots) {
  extern __shared__ __align__(16) float row_memory[];
  __shared__ float sums[kWarp];
  __shared__ uint32_t largest[kWarp];
  const int32_t cols = residual.cols;
  NormWeights weights(weight, cols);
  BlockRow row(row_memory, cols);
  begin_kernel();
  const int64_t index = blockIdx.x;
  PeerRows<Act> exchange(peers, cols, two_shots);
  const float squares = add_sum(peers, exchange, row_of<Act>(residual, index), row_of<Act>(delta, index), cols, row);
  const float scale = inverse_rms(squares, cols, eps, sums);
  exchange.close();
  weights.store_normalized<Act>(row, scale, targets, index, largest);
}

/* The same for whole packs of bf16, one in a thread. */
__global__ void __launch_bounds__(kMaxRowThreads)
    reduce_rms_norm_whole_kernel(const __grid_constant__ Peers peers, glm_tensor residual, glm_tensor delta,
                                 const float* weight, float eps, RowTargets targets, bool two_shots) {
  __shared__ float sums[kWarp];
  __shared__ uint32_t largest[kWarp];
  const int32_t cols = residual.cols;
  const auto first = static_cast<int32_t>(threadIdx.x) * kPack;
  const bool has_pack = first < cols;
  float weights[kPack];
  if (has_pack) load_whole(weight + first, weights);
  begin_kernel();
  const int64_t index = blockIdx.x;
  bf16* const at = row_of<bf16>(residual, index) + first;
  PeerRows<bf16> exchange(peers, cols, two_shots);
  float sum[kPack];
  if (has_pack) {
    load_pack(row_of<bf16>(delta, index), first, cols, sum);
    exchange.send(index, first, sum);
  }
  if (index == 0 && threadIdx.x == 0) count_exchange(peers);
  Packed pack;
  float squares = 0.0f;
  if (has_pack) {
    pack = load_packed(at);
    exchange.sum(index, first, sum);
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) {
      const uint32_t word = pack.words[i];
      pack.words[i] = rounded_pair(low_of(word) + sum[2 * i], high_of(word) + sum[2 * i + 1]);
    }
    squares = sum_of_squares(pack);
    store_packed(at, pack);
  }
  const float scale = 1.0f / sqrtf(whole_row_sum<1>(&squares, sums) / static_cast<float>(cols) + eps);
  exchange.close();
  store_whole_row<1>(cols, targets, index, largest, [&](int, int32_t) { return normalized(pack, scale, weights); });
}

}  // namespace

size_t rms_norm_workspace(const glm_device* device, const glm_rms_norm_args* args) {
  return args->reduce == 0 ? 0 : sum_workspace(device, args->delta, args->rows);
}

glm_status rms_norm(glm_device* device, const glm_rms_norm_args* args) {
  if (args->reduce == 0 || device->peers.num_ranks == 1 || args->rows == 0) return add_rms_norm(device, args);
  if (const glm_status status = check_group(device); status != GLM_OK) return status;
  const int32_t cols = args->residual.cols;
  const ReducePath path = reduce_path(device, args->delta.dtype, args->rows, cols);
  if (path == ReducePath::kInPlace || path == ReducePath::kNccl) {
    const glm_status status = sum_large(device, args->delta, args->rows, path);
    return status == GLM_OK ? add_rms_norm(device, args) : status;
  }
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(cols), shared_row_bytes(cols)};
  const RowTargets targets{args->out, args->q, args->scale};
  const bool two_shots = path == ReducePath::kTwoShots;
  if (takes_whole_rows(args, targets)) {
    const Grid whole{grid.blocks, grid.threads};
    return launch(device, "rms_norm", whole, reduce_rms_norm_whole_kernel, device->peers, args->residual, args->delta,
                  args->weight, args->eps, targets, two_shots);
  }
  return with_act(args->residual.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "rms_norm", grid, reduce_rms_norm_kernel<Act>, device->peers, args->residual, args->delta,
                  args->weight, args->eps, targets, two_shots);
  });
}

}  // namespace glm::cuda
