#include "attention.cuh"
#include "launch.h"

namespace glm::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kMaxDimsPerLane = 8; /* head sizes up to 256 */

/* One warp's sums over the keys warp, warp + kWarps, ... */
struct WarpSums {
  SoftmaxState state;
  float sums[kMaxDimsPerLane] = {};
};

template <typename T>
__device__ __forceinline__ void load_head(const T* from, int32_t dim, float out[kMaxDimsPerLane]) {
#pragma unroll
  for (int i = 0; i < kMaxDimsPerLane; ++i) {
    const int at = static_cast<int>(threadIdx.x) % kWarp + i * kWarp;
    out[i] = at < dim ? to_float(from[at]) : 0.0f;
  }
}

__device__ __forceinline__ void add(WarpSums& to, const float sums[kMaxDimsPerLane], float max, float sum) {
  const MergeFactors factors = merge(to.state, max, sum);
#pragma unroll
  for (int i = 0; i < kMaxDimsPerLane; ++i) to.sums[i] = merged(to.sums[i], sums[i], factors);
}

template <typename Act, typename Kv>
__device__ WarpSums attend(const AttentionParams& p, int64_t row, int head, int keys) {
  const int32_t dim = p.kv.head_dim;
  const int32_t slot = p.step.row_slots[row];
  float q[kMaxDimsPerLane];
  load_head(row_of<Act>(p.q, row) + static_cast<int64_t>(head) * dim, dim, q);
  WarpSums result;
  for (int key = static_cast<int>(threadIdx.x) / kWarp; key < keys; key += kWarps) {
    const int64_t at = token_offset(p.kv, p.pages, slot, head / p.group, key);
    float k[kMaxDimsPerLane];
    float v[kMaxDimsPerLane];
    load_head(static_cast<const Kv*>(p.kv.k) + at, dim, k);
    load_head(static_cast<const Kv*>(p.kv.v) + at, dim, v);
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxDimsPerLane; ++i) score = fmaf(q[i], k[i], score);
    add(result, v, warp_sum(score) * p.softmax_scale, 1.0f);
  }
  return result;
}

/* Block (x, y): row, query head. */
template <typename Act, typename Kv>
__global__ void __launch_bounds__(kWarps* kWarp) attention_scalar_kernel(const __grid_constant__ AttentionParams p) {
  __shared__ float sums[kWarps][kMaxDimsPerLane * kWarp];
  __shared__ float2 weights[kWarps];
  begin_kernel();
  const int64_t row = blockIdx.x;
  const int head = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int keys = p.step.positions[row] + 1;
  const WarpSums own = attend<Act, Kv>(p, row, head, keys);
#pragma unroll
  for (int i = 0; i < kMaxDimsPerLane; ++i) sums[warp][i * kWarp + lane] = own.sums[i];
  if (lane == 0) weights[warp] = make_float2(own.state.max, own.state.sum);
  __syncthreads();
  if (warp != 0) return;
  WarpSums total = own;
  for (int other = 1; other < min(kWarps, keys); ++other) {
    float added[kMaxDimsPerLane];
    load_head(sums[other], kMaxDimsPerLane * kWarp, added);
    add(total, added, weights[other].x, weights[other].y);
  }
  Act* out = row_of<Act>(p.out, row) + static_cast<int64_t>(head) * p.kv.head_dim;
#pragma unroll
  for (int i = 0; i < kMaxDimsPerLane; ++i) {
    if (i * kWarp + lane < p.kv.head_dim) out[i * kWarp + lane] = from_float<Act>(total.sums[i] / total.state.sum);
  }
}

}  // namespace

glm_status attention_scalar(glm_device* device, const AttentionParams& params, int rows) {
  if (params.kv.head_dim > kMaxDimsPerLane * kWarp) {
    device->last_error =
        "paged_attention: head_dim is " + std::to_string(params.kv.head_dim) + "; at most 256 is supported";
    return GLM_UNSUPPORTED;
  }
  const Grid grid{dim3(static_cast<unsigned>(rows), static_cast<unsigned>(params.heads)), kWarps * kWarp};
  return with_act(params.q.dtype, [&](auto act) {
    return with_kv(params.kv.dtype, [&](auto kv) {
      using Act = typename decltype(act)::type;
      using Kv = typename decltype(kv)::type;
      return launch(device, "paged_attention", grid, attention_scalar_kernel<Act, Kv>, params);
    });
  });
}

}  // namespace glm::cuda
