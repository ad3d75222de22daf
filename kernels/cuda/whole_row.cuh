/* Rows of bf16 in whole, aligned packs, whose sums and scales have the bits that a block of a thread a pack gives them (row.cuh): a thread
 * holds kEach packs, blockDim.x apart, and each counts as a thread of its own. Values stay rounded, two in a word. */
#ifndef GLM_CUDA_WHOLE_ROW_CUH
#define GLM_CUDA_WHOLE_ROW_CUH

#include <type_traits>

#include "device.h"
#include "row.cuh"

namespace glm::cuda {

/* Columns 2i and 2i + 1 of a pack in word i. */
struct Packed {
  uint32_t words[kPack / 2];
};

constexpr int32_t kOneEachRows = 132; /* up to so many, a row has a multiprocessor for itself */

inline bool has_whole_packs(const glm_tensor& tensor, int32_t cols) {
  if (tensor.data == nullptr) return true;
  const size_t element = bytes_of(tensor.dtype);
  const size_t pack = element * kPack < 16 ? element * kPack : 16;
  return cols % kPack == 0 && reinterpret_cast<uintptr_t>(tensor.data) % pack == 0 &&
         static_cast<size_t>(tensor.stride) * element % pack == 0;
}

/* Whether a row of the targets can be stored from whole packs of bf16, one scale a row. */
inline bool takes_whole_rows(const RowTargets& targets, int32_t cols) {
  return cols <= kMaxRowThreads * kPack && has_whole_packs(targets.out, cols) && has_whole_packs(targets.q, cols) &&
         (targets.q.data == nullptr || targets.scale.cols == 1);
}

/* Shared memory that a block of few rows asks for and does not use, so that no multiprocessor takes a second one while others have none: blocks of
 * the next kernel start beside those of the last, and rows take a multiprocessor's whole issue rate. */
inline size_t spreading_bytes(const glm_device* device, int32_t rows) {
  constexpr size_t kMoreThanHalf = 116 * 1024;
  return rows <= device->sm_count ? kMoreThanHalf : 0;
}

/* Calls f with how many packs a thread of many rows has, an integral constant: `threads` are row_threads(cols). */
template <typename F>
auto with_each(int32_t rows, int threads, F&& f) {
  if (rows > kOneEachRows && threads % (2 * kWarp) == 0) return f(std::integral_constant<int, 2>{});
  return f(std::integral_constant<int, 1>{});
}

/* Calls f(j, its first column) for each of a thread's packs. */
template <int kEach, typename F>
__device__ __forceinline__ void for_each_whole(int32_t cols, F&& f) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const auto first = static_cast<int32_t>(threadIdx.x + j * blockDim.x) * kPack;
    if (first < cols) f(j, first);
  }
}

/* Past the L1 (beside.h). */
__device__ __forceinline__ Packed load_packed(const bf16* from) {
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
  return {{words.x, words.y, words.z, words.w}};
}
__device__ __forceinline__ void load_whole(const float* from, float out[kPack]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0];
  const float4 high = reinterpret_cast<const float4*>(from)[1];
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}
__device__ __forceinline__ void store_packed(bf16* to, const Packed& pack) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack.words[0], pack.words[1], pack.words[2], pack.words[3]);
}

__device__ __forceinline__ float low_of(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_of(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/* sums[i] += other[i], rounded. */
__device__ __forceinline__ void add_packed(Packed& sums, const Packed& other) {
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    const uint32_t a = sums.words[i];
    const uint32_t b = other.words[i];
    sums.words[i] = rounded_pair(low_of(a) + low_of(b), high_of(a) + high_of(b));
  }
}

__device__ __forceinline__ float sum_of_squares(const Packed& pack) {
  float squares = 0.0f;
#pragma unroll
  for (const uint32_t word : pack.words) {
    squares = fmaf(low_of(word), low_of(word), squares);
    squares = fmaf(high_of(word), high_of(word), squares);
  }
  return squares;
}

/* Of both halves of each word, on magnitudes (magnitude_bits). */
__device__ __forceinline__ uint32_t packed_absmax(uint32_t largest, const Packed& pack) {
#pragma unroll
  for (const uint32_t word : pack.words) largest = __vmaxu2(largest, word & 0x7fff7fffu);
  return largest;
}

/* Over the block, the sum of a block of kEach times as many threads: block_sum's order. `shared`: a word for each of their warps, which
 * nobody reads any more. */
template <int kEach>
__device__ __forceinline__ float whole_row_sum(float parts[kEach], float* shared) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) parts[j] += __shfl_xor_sync(0xffffffffu, parts[j], offset);
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (lane == 0) shared[warp + j * warps] = parts[j];
  }
  __syncthreads();
  return warp_sum(lane < kEach * warps ? shared[lane] : 0.0f);
}

/* The largest of a warp's magnitudes, of whose pairs each lane knows its own largest. */
__device__ __forceinline__ uint32_t warp_absmax(uint32_t pairs) {
  return __reduce_max_sync(0xffffffffu, max(pairs & 0xffffu, pairs >> 16));
}

/* The scale (scale_of) of a row that a warp has. */
__device__ __forceinline__ float warp_row_scale(uint32_t pairs) {
  return scale_of(warp_absmax(pairs) << 16);
}

/* Likewise of a block's row. `shared`: a word a warp, as above. */
__device__ __forceinline__ float whole_row_scale(uint32_t pairs, uint32_t* shared) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t largest = warp_absmax(pairs);
  if (lane == 0) shared[threadIdx.x / kWarp] = largest;
  __syncthreads();
  return scale_of(__reduce_max_sync(0xffffffffu, lane < warps ? shared[lane] : 0u) << 16);
}

/* At most 1 / x, and at most 4 ulp below it. */
__device__ __forceinline__ float reciprocal_below(float x) {
  float near; /* within an ulp */
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return __uint_as_float(__float_as_uint(near) - 2);
}

/* Quotients of bf16 numbers by a scale, as FP8. The reciprocal has two words: the first is too small, so the second is not
 * negative and -0 stays -0. For a scale that is the 448th part of a bf16 number no smaller than x, x times both rounds as x / scale does
 * (all pairs of such numbers were compared). */
class Quantizer {
 public:
  __device__ __forceinline__ explicit Quantizer(float scale)
      : scale_(scale), high_(reciprocal_below(scale)), low_(fmaf(-scale, high_, 1.0f) * high_) {}

  __device__ __forceinline__ void store(const Packed& pack, fp8* to) const {
    if (!is_ordinary_scale(scale_)) return store_any(pack, to);
    uint32_t codes[kPack / 2];
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) {
      const float2 pair = make_float2(quotient(low_of(pack.words[i])), quotient(high_of(pack.words[i])));
      codes[i] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }
    *reinterpret_cast<uint2*>(to) = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
  }

 private:
  __device__ __forceinline__ float quotient(float x) const { return fmaf(x, high_, x * low_); }

  __device__ __forceinline__ void store_any(const Packed& pack, fp8* to) const {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const uint32_t word = pack.words[i / 2];
      to[i] = from_float<fp8>((i % 2 == 0 ? low_of(word) : high_of(word)) / scale_);
    }
  }

  float scale_;
  float high_;
  float low_;
};

/* Writes row `index` of the targets; `pack(j, first)` gives its columns [first, first + 8), the thread's j-th pack. `shared`: a word a
 * warp. */
template <int kEach, typename Pack>
__device__ __forceinline__ void store_whole_row(int32_t cols, const RowTargets& targets, int64_t index,
                                                uint32_t* shared, Pack&& pack) {
  Packed packs[kEach];
  bf16* out = targets.out.data == nullptr ? nullptr : row_of<bf16>(targets.out, index);
  uint32_t largest = 0;
  for_each_whole<kEach>(cols, [&](int j, int32_t first) {
    packs[j] = pack(j, first);
    largest = packed_absmax(largest, packs[j]);
    if (out != nullptr) store_packed(out + first, packs[j]);
  });
  if (targets.q.data == nullptr) return;
  const float scale = whole_row_scale(largest, shared);
  if (threadIdx.x == 0) *row_of<float>(targets.scale, index) = scale;
  const Quantizer quantizer(scale);
  fp8* q = row_of<fp8>(targets.q, index);
  for_each_whole<kEach>(cols, [&](int j, int32_t first) { quantizer.store(packs[j], q + first); });
}

}  // namespace glm::cuda

#endif
