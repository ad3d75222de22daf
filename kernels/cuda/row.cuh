/* One row per block: packs of 8 columns move between memory and a row of f32 in shared memory. A pack always belongs to the
 * same thread, so passes over the shared row need no barrier between them. Shared rows start at multiples of 16 bytes. */
#ifndef GLM_CUDA_ROW_CUH
#define GLM_CUDA_ROW_CUH

#include <type_traits>

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

/* A whole aligned pack of a row in global memory, past the L1 (beside.h). */
template <typename T>
__device__ __forceinline__ void load_pack_past_l1(const T* from, float out[kPack]) {
  using Word = std::conditional_t<sizeof(PackOf<T>) == 8, uint2, uint4>;
  PackOf<T> pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); ++i) {
    reinterpret_cast<Word*>(&pack)[i] = __ldcg(reinterpret_cast<const Word*>(from) + i);
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) out[i] = to_float(pack.values[i]);
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

/* A half of the shared row's pack at column `first`. The halves change places every four packs: so the 16-byte accesses of eight
 * neighbouring threads, which go to memory together, meet in no bank. */
__device__ __forceinline__ float4* shared_half(float* row, int32_t first, int half) {
  const int pack = first / kPack;
  return reinterpret_cast<float4*>(row) + 2 * pack + (half ^ (pack / 4 & 1));
}
__device__ __forceinline__ void read_shared_pack(float* row, int32_t first, float out[kPack]) {
  const float4 low = *shared_half(row, first, 0);
  const float4 high = *shared_half(row, first, 1);
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}
__device__ __forceinline__ void write_shared_pack(float* row, int32_t first, const float in[kPack]) {
  *shared_half(row, first, 0) = make_float4(in[0], in[1], in[2], in[3]);
  *shared_half(row, first, 1) = make_float4(in[4], in[5], in[6], in[7]);
}

/* A row of f32 in shared memory (shared_row_bytes); where each thread has one pack at most, it stays in registers. */
class BlockRow {
 public:
  __device__ __forceinline__ BlockRow(float* shared, int32_t cols)
      : shared_(shared), is_kept_(cols <= static_cast<int32_t>(blockDim.x) * kPack) {}

  __device__ __forceinline__ void write(int32_t first, const float in[kPack]) {
    if (is_kept_) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) kept_[i] = in[i];
    } else {
      write_shared_pack(shared_, first, in);
    }
  }
  __device__ __forceinline__ void read(int32_t first, float out[kPack]) const {
    if (is_kept_) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) out[i] = kept_[i];
    } else {
      read_shared_pack(shared_, first, out);
    }
  }

 private:
  float* shared_;
  bool is_kept_;
  float kept_[kPack] = {};
};

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

__device__ __forceinline__ uint32_t pack_absmax(const float values[kPack], int32_t first, int32_t cols) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPack; ++i) largest = max(largest, first + i < cols ? magnitude_bits(values[i]) : 0u);
  return largest;
}

/* x / divisor, rounded to nearest even, where neither is tiny or huge: the quotient by the rounded reciprocal, corrected twice by its remainder
 * (Markstein, IA-64 and elementary functions, 8). */
__device__ __forceinline__ float divide_by(float x, float divisor, float reciprocal) {
  float quotient = x * reciprocal;
  quotient = fmaf(fmaf(-divisor, quotient, x), reciprocal, quotient);
  return fmaf(fmaf(-divisor, quotient, x), reciprocal, quotient);
}
/* The same for a scale and |x| up to about 448 times it: quotients far below FP8's range come out as some number that rounds to the same zero. */
__device__ __forceinline__ float scaled_by(float x, float scale, float reciprocal) {
  return copysignf(divide_by(x, scale, reciprocal), x);
}
__device__ __forceinline__ bool is_ordinary_scale(float scale) {
  return scale > 0x1p-100f && scale < 0x1p100f;
}

__device__ __forceinline__ void quantize_pack(const float values[kPack], int32_t first, int32_t cols, float scale,
                                              fp8* q) {
  if (first + kPack <= cols && is_pack_aligned(q) && is_ordinary_scale(scale)) { /* no value is infinite or NaN */
    const float reciprocal = 1.0f / scale;
    uint32_t codes[kPack / 2];
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) {
      const float2 pair =
          make_float2(scaled_by(values[2 * i], scale, reciprocal), scaled_by(values[2 * i + 1], scale, reciprocal));
      codes[i] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }
    *reinterpret_cast<uint2*>(q + first) = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
    return;
  }
  float scaled[kPack];
#pragma unroll
  for (int i = 0; i < kPack; ++i) scaled[i] = first + i < cols ? values[i] / scale : 0.0f;
  store_pack(q, first, cols, scaled);
}

/* Rounds all to act, two at a time. */
template <typename Act>
__device__ __forceinline__ void round_pack(float values[kPack]) {
  if constexpr (std::is_same_v<Act, bf16>) {
#pragma unroll
    for (int i = 0; i < kPack; i += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
      values[i] = __low2float(pair);
      values[i + 1] = __high2float(pair);
    }
  }
}

/* With the scale of its group of 128 columns: 16 neighbouring threads' packs. */
__device__ __forceinline__ void quantize_by_group(const float values[kPack], int32_t first, int32_t cols, fp8* q,
                                                  float* scales) {
  constexpr int kLanesPerGroup = GLM_FP8_BLOCK / kPack;
  uint32_t largest = pack_absmax(values, first, cols);
#pragma unroll
  for (int offset = kLanesPerGroup / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  const float scale = scale_of(largest);
  if (threadIdx.x % kLanesPerGroup == 0 && first < cols) scales[first / GLM_FP8_BLOCK] = scale;
  quantize_pack(values, first, cols, scale, q);
}

/* Where a computed row goes: to `out` (act), quantised to `q`, or both. */
struct RowTargets {
  glm_tensor out;
  glm_tensor q;
  glm_tensor scale;
};

/* Writes row `index` of the targets; `pack(first, values)` gives its columns [first, first + 8), rounded to act. Scales are those
 * of glm_quantize_args: one for the row if the targets' scale has one column, for which the row waits in `row`, else one
 * for each group. `reduction`: one word a warp. */
template <typename Act, typename Pack>
__device__ __forceinline__ void store_row(BlockRow& row, int32_t cols, const RowTargets& targets, int64_t index,
                                          uint32_t* reduction, Pack&& pack) {
  Act* out = targets.out.data == nullptr ? nullptr : row_of<Act>(targets.out, index);
  fp8* q = targets.q.data == nullptr ? nullptr : row_of<fp8>(targets.q, index);
  float* scales = q == nullptr ? nullptr : row_of<float>(targets.scale, index);
  const bool by_row = targets.scale.cols == 1;
  uint32_t largest = 0;
  for_each_pack(cols, [&](int32_t first) {
    float values[kPack] = {};
    if (first < cols) pack(first, values);
    if (first < cols && out != nullptr) store_pack(out, first, cols, values);
    if (q == nullptr) return;
    if (!by_row) {
      quantize_by_group(values, first, cols, q, scales);
    } else if (first < cols) {
      largest = max(largest, pack_absmax(values, first, cols));
      row.write(first, values);
    }
  });
  if (q == nullptr || !by_row) return;
  const float scale = scale_of(block_max(largest, reduction));
  if (threadIdx.x == 0) scales[0] = scale;
  for_each_pack(cols, [&](int32_t first) {
    if (first >= cols) return;
    float values[kPack];
    row.read(first, values);
    quantize_pack(values, first, cols, scale, q);
  });
}

}  // namespace glm::cuda

#endif
