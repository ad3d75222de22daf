#include <string>
#include <type_traits>

#include "kernel.cuh"
#include "kv_cache.cuh"
#include "launch.h"
#include "ops.h"

namespace glm::cuda {

namespace {

constexpr int kHeadsPerBlock = 4; /* one warp each */
constexpr int kMostEach = 8;      /* elements of a head in a lane */

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

/* What a warp knows of its head before its predecessor ends: the model's parameters, and inputs of the step that the host copied. A lane has
 * elements lane, lane + 32 and so on, at most kEach of them. */
template <int kEach>
struct HeadInputs {
  int32_t position;
  int32_t slot;
  float weights[kEach];
  float cosines[kEach];
  float sines[kEach];
};

template <int kEach>
__device__ __forceinline__ HeadInputs<kEach> load_head_inputs(const QkParams& p, int64_t row, const float* weight,
                                                              bool is_rotated) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  HeadInputs<kEach> in = {__ldcg(p.step.positions + row), __ldcg(p.step.row_slots + row)};
  const int32_t half = is_rotated ? p.rotary_dim / 2 : 0;
  const int64_t angle = static_cast<int64_t>(in.position) * half;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = lane + j * kWarp;
    if (weight != nullptr && i < p.kv.head_dim) in.weights[j] = weight[i];
    if (i >= half) continue;
    in.cosines[j] = p.rope_cos[angle + i];
    in.sines[j] = p.rope_sin[angle + i];
  }
  return in;
}

template <typename Act, int kEach>
__device__ __forceinline__ void norm_head(float x[kEach], const float weights[kEach], int32_t dim, float eps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kEach; ++j) squares = lane + j * kWarp < dim ? fmaf(x[j], x[j], squares) : squares;
  const float inverse_rms = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(dim) + eps);
#pragma unroll
  for (int j = 0; j < kEach; ++j) x[j] = rounded_to<Act>(weights[j] * rounded_to<Act>(x[j] * inverse_rms));
}

/* `shared`: the head's elements, by way of which lanes get the other of each pair. */
template <int kEach>
__device__ __forceinline__ void rotate_head(float x[kEach], const HeadInputs<kEach>& in, int32_t half, int32_t dim,
                                            float* shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (lane + j * kWarp < dim) shared[lane + j * kWarp] = x[j];
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = lane + j * kWarp;
    if (i >= half) continue;
    const float low = shared[i];
    const float high = shared[i + half];
    shared[i] = low * in.cosines[j] - high * in.sines[j];
    shared[i + half] = high * in.cosines[j] + low * in.sines[j];
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (lane + j * kWarp < dim) x[j] = shared[lane + j * kWarp];
  }
}

template <typename T, int kEach>
__device__ __forceinline__ void store_head(const float x[kEach], int32_t dim, T* to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (lane + j * kWarp < dim) to[lane + j * kWarp] = from_float<T>(x[j]);
  }
}

/* Block (x, y): row, heads of q, then of k, then of v. */
template <typename Act, typename Kv, int kEach>
__global__ void qk_norm_rope_store_kernel(const __grid_constant__ QkParams p) {
  extern __shared__ float shared[];
  release_successor();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int head = static_cast<int>(blockIdx.y) * kHeadsPerBlock + warp;
  if (head >= p.heads + 2 * p.kv.kv_heads) return;
  const int64_t row = blockIdx.x;
  const int32_t dim = p.kv.head_dim;
  const bool is_query = head < p.heads;
  const bool is_value = head >= p.heads + p.kv.kv_heads;
  const float* weight = is_value ? nullptr : is_query ? p.q_norm : p.k_norm;
  const HeadInputs<kEach> in = load_head_inputs<kEach>(p, row, weight, !is_value);
  wait_for_predecessor();
  const Act* from = row_of<Act>(p.qkv, row) + static_cast<int64_t>(head) * dim;
  const int kv_head = is_query ? 0 : (head - p.heads) % p.kv.kv_heads;
  const int64_t at = is_query ? 0 : token_offset(p.kv, p.pages, in.slot, kv_head, in.position);
  float x[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) x[j] = lane + j * kWarp < dim ? to_float(from[lane + j * kWarp]) : 0.0f;
  if (weight != nullptr) norm_head<Act, kEach>(x, in.weights, dim, p.eps);
  if (!is_value) rotate_head<kEach>(x, in, p.rotary_dim / 2, dim, shared + warp * dim);
  if (is_query) {
    store_head<Act, kEach>(x, dim, row_of<Act>(p.out, row) + static_cast<int64_t>(head) * dim);
  } else {
    store_head<Kv, kEach>(x, dim, static_cast<Kv*>(is_value ? p.kv.v : p.kv.k) + at);
  }
}

}  // namespace

glm_status qk_norm_rope_store(glm_device* device, const glm_qk_norm_rope_store_args* args) {
  if (args->kv.head_dim > kMostEach * kWarp) {
    glm_device::last_error =
        "qk_norm_rope_store: head_dim is " + std::to_string(args->kv.head_dim) + "; at most 256 is supported";
    return GLM_UNSUPPORTED;
  }
  const QkParams p{*args->step,    {args->slots->page_table, args->slots->max_pages},
                   args->qkv,      args->q_norm,
                   args->k_norm,   args->eps,
                   args->heads,    args->rotary_dim,
                   args->rope_cos, args->rope_sin,
                   args->kv,       args->out};
  const int heads = args->heads + 2 * args->kv.kv_heads;
  const Grid grid{dim3(static_cast<unsigned>(args->rows), blocks_for(heads, kHeadsPerBlock)), kHeadsPerBlock * kWarp,
                  sizeof(float) * kHeadsPerBlock * args->kv.head_dim};
  const bool settled = device->last_turn.launches == device->launches && !device->last_turn.ends_beside;
  const glm_status status = with_act(args->qkv.dtype, [&](auto act) {
    return with_kv(args->kv.dtype, [&](auto kv) {
      using Act = typename decltype(act)::type;
      using Kv = typename decltype(kv)::type;
      const auto with = [&](auto each) {
        return launch(device, "qk_norm_rope_store", grid, qk_norm_rope_store_kernel<Act, Kv, each()>, p);
      };
      if (args->kv.head_dim <= 4 * kWarp) return with(std::integral_constant<int, 4>{});
      return with(std::integral_constant<int, kMostEach>{});
    });
  });
  device->settled_launches = settled ? device->launches : 0;
  return status;
}

}  // namespace glm::cuda
