#include "kernel.cuh"
#include "kv_cache.cuh"
#include "launch.h"
#include "ops.h"

namespace glm::cuda {

namespace {

constexpr int kHeadsPerBlock = 4; /* one warp each */

struct QkParams {
  glm_step_inputs step;
  KvPages pages;
  glm_tensor qkv;
  const float* q_norm;
  const float* k_norm;
  float eps;
  int32_t heads;
  int32_t rotary_dim;
  const float* rope_cos;
  const float* rope_sin;
  glm_kv_layer kv;
  glm_tensor out;
};

/* x: one head in shared memory. The same lane writes an element every time, save for the rotation's barrier. */
template <typename Act>
__device__ void norm_head(float* x, const float* weight, int32_t dim, float eps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float squares = 0.0f;
  for (int i = lane; i < dim; i += kWarp) squares = fmaf(x[i], x[i], squares);
  const float inverse_rms = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(dim) + eps);
  for (int i = lane; i < dim; i += kWarp) x[i] = rounded_to<Act>(weight[i] * rounded_to<Act>(x[i] * inverse_rms));
}

__device__ void rotate_head(float* x, const float* cosines, const float* sines, int32_t half) {
  __syncwarp();
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < half; i += kWarp) {
    const float low = x[i];
    const float high = x[i + half];
    x[i] = low * cosines[i] - high * sines[i];
    x[i + half] = high * cosines[i] + low * sines[i];
  }
  __syncwarp();
}

template <typename T>
__device__ void store_head(const float* x, int32_t dim, T* to) {
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < dim; i += kWarp) to[i] = from_float<T>(x[i]);
}

/* Block (x, y): row, heads of q, then of k, then of v. */
template <typename Act, typename Kv>
__global__ void qk_norm_rope_store_kernel(const __grid_constant__ QkParams p) {
  extern __shared__ float shared[];
  begin_kernel();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int head = static_cast<int>(blockIdx.y) * kHeadsPerBlock + warp;
  if (head >= p.heads + 2 * p.kv.kv_heads) return;
  const int64_t row = blockIdx.x;
  const int32_t dim = p.kv.head_dim;
  const int32_t position = p.step.positions[row];
  const bool is_query = head < p.heads;
  const bool is_value = head >= p.heads + p.kv.kv_heads;
  float* x = shared + warp * dim;
  const Act* from = row_of<Act>(p.qkv, row) + static_cast<int64_t>(head) * dim;
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < dim; i += kWarp) x[i] = to_float(from[i]);
  if (!is_value) {
    const float* weight = is_query ? p.q_norm : p.k_norm;
    if (weight != nullptr) norm_head<Act>(x, weight, dim, p.eps);
    const int32_t half = p.rotary_dim / 2;
    const int64_t angle = static_cast<int64_t>(position) * half;
    rotate_head(x, p.rope_cos + angle, p.rope_sin + angle, half);
  }
  if (is_query) {
    store_head(x, dim, row_of<Act>(p.out, row) + static_cast<int64_t>(head) * dim);
    return;
  }
  const int kv_head = (head - p.heads) % p.kv.kv_heads;
  const int64_t at = token_offset(p.kv, p.pages, p.step.row_slots[row], kv_head, position);
  store_head(x, dim, static_cast<Kv*>(is_value ? p.kv.v : p.kv.k) + at);
}

}  // namespace

glm_status qk_norm_rope_store(glm_device* device, const glm_qk_norm_rope_store_args* args) {
  const QkParams p{*args->step,    {args->slots->page_table, args->slots->max_pages},
                   args->qkv,      args->q_norm,
                   args->k_norm,   args->eps,
                   args->heads,    args->rotary_dim,
                   args->rope_cos, args->rope_sin,
                   args->kv,       args->out};
  const int heads = args->heads + 2 * args->kv.kv_heads;
  const Grid grid{dim3(static_cast<unsigned>(args->rows), blocks_for(heads, kHeadsPerBlock)), kHeadsPerBlock * kWarp,
                  sizeof(float) * kHeadsPerBlock * args->kv.head_dim};
  return with_act(args->qkv.dtype, [&](auto act) {
    return with_kv(args->kv.dtype, [&](auto kv) {
      using Act = typename decltype(act)::type;
      using Kv = typename decltype(kv)::type;
      return launch(device, "qk_norm_rope_store", grid, qk_norm_rope_store_kernel<Act, Kv>, p);
    });
  });
}

}  // namespace glm::cuda
