/* Query rows as the left operand of mma and wgmma, in registers. */
#ifndef GLM_CUDA_ATTENTION_QUERIES_CUH
#define GLM_CUDA_ATTENTION_QUERIES_CUH

#include "attention_softmax.cuh"

namespace glm::cuda {

/* What is multiplied. */
template <typename Kv>
using Wide = std::conditional_t<std::is_same_v<Kv, fp8>, f16, bf16>;

__device__ __forceinline__ uint32_t pack(float x, float y, bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float x, float y, f16) {
  const __half2 pair = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

/* Two neighbouring elements as T. */
template <typename T>
__device__ __forceinline__ uint32_t converted_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, bf16>) return pair;
  return pack(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u), T{});
}

/* The lane's part of 16 query rows, its rows at `rows`, for multiplying by keys as T. f16 keys come from FP8, four neighbouring columns to
 * a lane (attention_multiply.cuh): queries follow that order. */
template <typename T, int kDim>
__device__ __forceinline__ void load_queries(const bf16* const (&rows)[2], uint32_t (&out)[kDim / 16][4]) {
  constexpr bool kWide = std::is_same_v<T, f16>;
  constexpr int kNext = kWide ? 2 : 8;
  const int first = lane_member() * (kWide ? 4 : 2);
  const bf16* from[2] = {rows[0] + first, rows[1] + first};
  if ((reinterpret_cast<uintptr_t>(rows[0]) | reinterpret_cast<uintptr_t>(rows[1])) % 4 != 0) {
#pragma unroll
    for (int at = 0; at < kDim / 4; ++at) {
      const bf16* pair = from[at % 2] + at / 4 * 16 + at % 4 / 2 * kNext;
      out[at / 4][at % 4] = pack(to_float(pair[0]), to_float(pair[1]), T{});
    }
    return;
  }
  /* All loads are on their way before the first is waited for. */
#pragma unroll
  for (int at = 0; at < kDim / 4; ++at) {
    out[at / 4][at % 4] = *reinterpret_cast<const uint32_t*>(from[at % 2] + at / 4 * 16 + at % 4 / 2 * kNext);
  }
#pragma unroll
  for (int at = 0; at < kDim / 4; ++at) out[at / 4][at % 4] = converted_pair<T>(out[at / 4][at % 4]);
}

/* The weights of a tile, as softmax_tile leaves them, as the left operand that values are multiplied by. */
template <typename T>
__device__ __forceinline__ void pack_weights(const float (&scores)[kTileScores], uint32_t (&out)[kTileKeys / 16][4]) {
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[step][i] = pack(scores[step * 8 + i * 2], scores[step * 8 + i * 2 + 1], T{});
    }
  }
}

}  // namespace glm::cuda

#endif
