#include <algorithm>
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

/* Where head `head` of a row goes: q's to `out`, k's and v's to their page. */
template <typename Act, typename Kv, typename Store>
__device__ __forceinline__ void with_place(const QkParams& p, int64_t row, int head, int64_t at, Store&& store) {
  if (head < p.heads) {
    store(row_of<Act>(p.out, row) + static_cast<int64_t>(head) * p.kv.head_dim);
  } else {
    store(static_cast<Kv*>(head >= p.heads + p.kv.kv_heads ? p.kv.v : p.kv.k) + at);
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
  with_place<Act, Kv>(p, row, head, at, [&](auto* to) { store_head<std::decay_t<decltype(*to)>, kEach>(x, dim, to); });
}

/* Heads of 128 bf16 of which 64 turn: half a warp a head. A lane has columns 2l and 2l + 1 of every 32, among which are both of each pair
 * that turns. */
constexpr int kPairDim = 128;
constexpr int kPairRotary = 64;
constexpr int kPairs = kPairDim / kWarp;
constexpr int kPairWarps = 8;

/* The sum over a head in the order of norm_head, whose lane i adds up columns i, i + 32 and so on. */
__device__ __forceinline__ float sum_of_squares(const float2 x[kPairs]) {
  float low = 0.0f;
  float high = 0.0f;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    low = fmaf(x[j].x, x[j].x, low);
    high = fmaf(x[j].y, x[j].y, high);
  }
#pragma unroll
  for (int offset = kWarp / 4; offset > 0; offset /= 2) {
    low += __shfl_xor_sync(0xffffffffu, low, offset);
    high += __shfl_xor_sync(0xffffffffu, high, offset);
  }
  return low + high;
}

__device__ __forceinline__ float2 rounded_pair(float x, float y) {
  return __bfloat1622float2(__floats2bfloat162_rn(x, y));
}

__device__ __forceinline__ void norm_pairs(float2 x[kPairs], float squares, const float2 weights[kPairs], float eps) {
  const float inverse_rms = 1.0f / sqrtf(squares / static_cast<float>(kPairDim) + eps);
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    x[j] = rounded_pair(x[j].x * inverse_rms, x[j].y * inverse_rms);
    x[j] = rounded_pair(weights[j].x * x[j].x, weights[j].y * x[j].y);
  }
}

template <typename T>
__device__ __forceinline__ void store_pair(float2 x, T* to) {
  struct alignas(2 * sizeof(T)) Pair {
    T low, high;
  };
  *reinterpret_cast<Pair*>(to) = {from_float<T>(x.x), from_float<T>(x.y)};
}

template <typename Kv>
__global__ void __launch_bounds__(kPairWarps* kWarp) qk_pairs_kernel(const __grid_constant__ QkParams p) {
  release_successor();
  constexpr int kLanes = kWarp / 2;
  const int first = static_cast<int>(threadIdx.x) % kLanes * 2;
  const int own = static_cast<int>((blockIdx.y * blockDim.x + threadIdx.x) / kLanes);
  const int heads = p.heads + 2 * p.kv.kv_heads;
  const int head = min(own, heads - 1);
  const int64_t row = blockIdx.x;
  const bool is_value = head >= p.heads + p.kv.kv_heads;
  const float* weight = is_value ? nullptr : head < p.heads ? p.q_norm : p.k_norm;
  const int32_t position = __ldcg(p.step.positions + row);
  const int32_t slot = __ldcg(p.step.row_slots + row);
  const auto pair_at = [&](const float* from) { return *reinterpret_cast<const float2*>(from + first); };
  float2 weights[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    if (weight != nullptr) weights[j] = pair_at(weight + j * kWarp);
  }
  const int64_t angle = static_cast<int64_t>(position) * (kPairRotary / 2);
  const float2 cosines = pair_at(p.rope_cos + angle);
  const float2 sines = pair_at(p.rope_sin + angle);
  wait_for_predecessor();
  const bf16* from = row_of<bf16>(p.qkv, row) + static_cast<int64_t>(head) * kPairDim + first;
  __nv_bfloat162 read[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) read[j] = *reinterpret_cast<const __nv_bfloat162*>(from + j * kWarp);
  const int32_t page = head < p.heads ? 0 : page_of(p.pages, slot, position);
  float2 x[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) x[j] = __bfloat1622float2(read[j]);
  const float squares = sum_of_squares(x);
  if (weight != nullptr) norm_pairs(x, squares, weights, p.eps);
  if (!is_value) {
    const float2 low = x[0];
    const float2 high = x[1];
    x[0] = make_float2(low.x * cosines.x - high.x * sines.x, low.y * cosines.y - high.y * sines.y);
    x[1] = make_float2(high.x * cosines.x + low.x * sines.x, high.y * cosines.y + low.y * sines.y);
  }
  if (own != head) return;
  const int64_t at = offset_in(p.kv, page, head - p.heads - (is_value ? p.kv.kv_heads : 0), position);
  with_place<bf16, Kv>(p, row, head, at, [&](auto* to) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) store_pair(x[j], to + first + j * kWarp);
  });
}

template <typename T>
bool is_pair_aligned(const void* data, int64_t stride = 0) {
  return reinterpret_cast<uintptr_t>(data) % (2 * sizeof(T)) == 0 && stride % 2 == 0;
}

template <typename Kv>
bool takes_pairs(const glm_qk_norm_rope_store_args* args) {
  const auto is_even = [](const glm_tensor& tensor) { return is_pair_aligned<bf16>(tensor.data, tensor.stride); };
  return args->qkv.dtype == GLM_BF16 && args->kv.head_dim == kPairDim && args->rotary_dim == kPairRotary &&
         is_even(args->qkv) && is_even(args->out) && is_pair_aligned<float>(args->q_norm) &&
         is_pair_aligned<float>(args->k_norm) && is_pair_aligned<float>(args->rope_cos) &&
         is_pair_aligned<float>(args->rope_sin) && is_pair_aligned<Kv>(args->kv.k) && is_pair_aligned<Kv>(args->kv.v);
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
      if (takes_pairs<Kv>(args)) {
        const int warps = std::min<int>(kPairWarps, blocks_for(heads, 2));
        const Grid pairs{dim3(grid.blocks.x, blocks_for(heads, 2 * warps)), warps * kWarp};
        return launch(device, "qk_norm_rope_store", pairs, qk_pairs_kernel<Kv>, p);
      }
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
