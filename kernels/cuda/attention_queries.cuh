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
__device__ __forceinline__ uint32_t load_pair(const bf16* from) {
  if (reinterpret_cast<uintptr_t>(from) % 4 != 0) return pack(to_float(from[0]), to_float(from[1]), T{});
  if constexpr (std::is_same_v<T, bf16>) {
    return *reinterpret_cast<const uint32_t*>(from);
  } else {
    const auto pair = *reinterpret_cast<const __nv_bfloat162*>(from);
    return pack(to_float(pair.x), to_float(pair.y), T{});
  }
}

/* The lane's part of 16 query rows, its rows at `rows` (NULL: zeros), for multiplying by keys as T. f16 keys come from FP8, four
 * neighbouring columns to a lane (attention_multiply.cuh): queries follow that order. */
template <typename T, int kDim>
__device__ __forceinline__ void load_queries(const bf16* const (&rows)[2], uint32_t (&out)[kDim / 16][4]) {
  constexpr bool kWide = std::is_same_v<T, f16>;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = kWide ? lane_member() * 4 + i / 2 * 2 : lane_member() * 2 + i / 2 * 8;
      const bf16* row = rows[i % 2];
      out[step][i] = row == nullptr ? 0 : load_pair<T>(row + step * 16 + column);
    }
  }
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
