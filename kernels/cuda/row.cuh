/* One row per block: packs of 8 columns move between memory and a row of f32 in shared memory. A pack always belongs to the
 * same thread, so passes over the shared row need no barrier between them. */
#ifndef GLM_CUDA_ROW_CUH
#define GLM_CUDA_ROW_CUH

#include "kernel.cuh"
#include "numeric.cuh"

namespace glm::cuda {

constexpr int kPack = 8;
constexpr int kMaxRowThreads = 1024;

/* Threads that give each pack of a row its own thread, as far as one block reaches. */
inline int row_threads(int32_t cols) {
  const int packs = (cols + kPack - 1) / kPack;
  const int threads = (packs + kWarp - 1) / kWarp * kWarp;
  return threads < kWarp ? kWarp : (threads > kMaxRowThreads ? kMaxRowThreads : threads);
}

/* Bytes of the shared row: whole packs. */
inline size_t shared_row_bytes(int32_t cols) {
  return static_cast<size_t>((cols + kPack - 1) / kPack) * kPack * sizeof(float);
}

template <typename T>
struct alignas(sizeof(T) * kPack < 16 ? sizeof(T) * kPack : 16) PackOf {
  T values[kPack];
};

template <typename T>
__device__ __forceinline__ bool is_pack_aligned(const T* row) {
  return reinterpret_cast<uintptr_t>(row) % alignof(PackOf<T>) == 0;
}

/* Columns [first, first + 8) of a row; columns past the end read as 0. */
template <typename T>
__device__ __forceinline__ void load_pack(const T* row, int32_t first, int32_t cols, float out[kPack]) {
  if (first + kPack <= cols && is_pack_aligned(row)) {
    const auto pack = *reinterpret_cast<const PackOf<T>*>(row + first);
#pragma unroll
    for (int i = 0; i < kPack; ++i) out[i] = to_float(pack.values[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) out[i] = first + i < cols ? to_float(row[first + i]) : 0.0f;
}

template <typename T>
__device__ __forceinline__ void store_pack(T* row, int32_t first, int32_t cols, const float in[kPack]) {
  if (first + kPack <= cols && is_pack_aligned(row)) {
    PackOf<T> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) pack.values[i] = from_float<T>(in[i]);
    *reinterpret_cast<PackOf<T>*>(row + first) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if (first + i < cols) row[first + i] = from_float<T>(in[i]);
  }
}

/* Calls f(first column) for every pack of this thread. Threads of a warp stay together; `first` may lie past the end. */
template <typename F>
__device__ __forceinline__ void for_each_pack(int32_t cols, F&& f) {
  const int32_t step = static_cast<int32_t>(blockDim.x) * kPack;
  const int32_t warp_first = static_cast<int32_t>(threadIdx.x) / kWarp * kWarp * kPack;
  for (int32_t base = 0; base + warp_first < cols; base += step) f(base + static_cast<int32_t>(threadIdx.x) * kPack);
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

/* On magnitudes the order of floats is that of their bits, with NaN on top. 1 if the group is all zero. */
__device__ __forceinline__ float scale_of(uint32_t absmax_bits) {
  const float scale = __uint_as_float(absmax_bits) / GLM_FP8_MAX;
  return scale == 0.0f ? 1.0f : scale;
}

__device__ __forceinline__ uint32_t pack_absmax(const float* row, int32_t first, int32_t cols) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPack; ++i) largest = max(largest, first + i < cols ? magnitude_bits(row[first + i]) : 0u);
  return largest;
}

__device__ __forceinline__ void quantize_pack(const float* row, int32_t first, int32_t cols, float scale, fp8* q) {
  float scaled[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i) scaled[i] = first + i < cols ? row[first + i] / scale : 0.0f;
  store_pack(q, first, cols, scaled);
}

/* The shared row (rounded to act) as glm_quantize_args says: one scale for the row if scale_cols is 1, else one for each
 * group of 128 columns, which is 16 neighbouring threads' packs. `reduction`: one word a warp. */
__device__ __forceinline__ void quantize_row(const float* row, int32_t cols, int32_t scale_cols, fp8* q, float* scales,
                                             uint32_t* reduction) {
  if (scale_cols == 1) {
    uint32_t largest = 0;
    for_each_pack(cols, [&](int32_t first) { largest = max(largest, pack_absmax(row, first, cols)); });
    const float scale = scale_of(block_max(largest, reduction));
    if (threadIdx.x == 0) scales[0] = scale;
    for_each_pack(cols, [&](int32_t first) { quantize_pack(row, first, cols, scale, q); });
    return;
  }
  constexpr int kLanesPerGroup = GLM_FP8_BLOCK / kPack;
  for_each_pack(cols, [&](int32_t first) {
    uint32_t largest = pack_absmax(row, first, cols);
#pragma unroll
    for (int offset = kLanesPerGroup / 2; offset > 0; offset /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    const float scale = scale_of(largest);
    if (threadIdx.x % kLanesPerGroup == 0 && first < cols) scales[first / GLM_FP8_BLOCK] = scale;
    quantize_pack(row, first, cols, scale, q);
  });
}

/* Where a computed row goes: to `out` (act), quantised to `q`, or both. */
struct RowTargets {
  glm_tensor out;
  glm_tensor q;
  glm_tensor scale;
};

/* Writes the shared row (rounded to act) to the targets' row `index`. */
template <typename Act>
__device__ __forceinline__ void store_row(const float* row, int32_t cols, const RowTargets& targets, int64_t index,
                                          uint32_t* reduction) {
  if (targets.out.data != nullptr) {
    Act* out = row_of<Act>(targets.out, index);
    for_each_pack(cols, [&](int32_t first) {
      if (first < cols) store_pack(out, first, cols, row + first);
    });
  }
  if (targets.q.data != nullptr) {
    quantize_row(row, cols, targets.scale.cols, row_of<fp8>(targets.q, index), row_of<float>(targets.scale, index),
                 reduction);
  }
}

}  // namespace glm::cuda

#endif
