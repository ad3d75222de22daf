/* How the four warps of a block share a tile of 64 keys: each scores 16 of the keys, then each sums a quarter of the head's columns over
 * all keys. FP8 keys and values are widened in registers to f16, which holds them exactly; so are queries. */
#ifndef GLM_CUDA_ATTENTION_MULTIPLY_CUH
#define GLM_CUDA_ATTENTION_MULTIPLY_CUH

#include "attention_queries.cuh"
#include "attention_tile.cuh"

namespace glm::cuda {

constexpr int kWarps = kAttentionThreads / kWarp;
constexpr int kKeysPerWarp = kTileKeys / kWarps;
constexpr int kProbabilityPitch = kTileKeys + 8;

/* A lane's part of a 16-row tile: rows group and group + 8, columns of this warp's quarter, by eights. Of each 16 columns of FP8 values
 * sums[2 * i] are the even ones, sums[2 * i + 1] the odd ones. */
template <int kDim>
struct Accumulator {
  static constexpr int kTiles = kDim / kWarps / 8;
  TileRows rows;
  SoftmaxState states[2];
  float sums[kTiles][4] = {};
};

__device__ __forceinline__ int warp_index() {
  return static_cast<int>(threadIdx.x) / kWarp;
}

/* scores += queries keys^T over the 16 keys from `keys` on. */
template <int kDim>
__device__ __forceinline__ void multiply_keys(const uint32_t (&queries)[kDim / 16][4], const bf16* keys,
                                              float (&scores)[2][4]) {
  const int row = lane_index() / 16 * 8 + lane_index() % 8;
  const bf16* from = keys + row * kPitch<bf16, kDim> + lane_index() / 8 % 2 * 8;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t b[4];
    load_matrices(b, from + step * 16);
    mma_16x8x16<bf16>(scores[0], queries[step], b[0], b[1]);
    mma_16x8x16<bf16>(scores[1], queries[step], b[2], b[3]);
  }
}

/* Likewise. Of each 16 columns a lane has four neighbours, of which the first two take the place of the first eight. */
template <int kDim>
__device__ __forceinline__ void multiply_keys(const uint32_t (&queries)[kDim / 16][4], const fp8* keys,
                                              float (&scores)[2][4]) {
  const int row = lane_index() / 16 * 8 + lane_index() % 8;
  const fp8* from = keys + row * kPitch<fp8, kDim> + lane_index() / 8 % 2 * 16;
  uint32_t codes[kDim / 32][4];
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) load_matrices(codes[i], from + i * 32);
#pragma unroll
  for (int step = 0; step < kDim / 16; step += 2) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = j / 2 + j % 2 * 2; /* neighbours in the queue do not wait for each other */
      const uint32_t four = codes[step / 2][i];
      mma_16x8x16<f16>(scores[i / 2], queries[step + i % 2], low_fp8_to_f16x2(four), high_fp8_to_f16x2(four));
    }
  }
}

/* Scores of this warp's 16 keys; -inf past the range. */
template <typename Kv, int kDim>
__device__ __forceinline__ void score_keys(const uint32_t (&queries)[kDim / 16][4], const Kv* k, int keys_left,
                                           float (&scores)[2][4]) {
  multiply_keys<kDim>(queries, k + warp_index() * kKeysPerWarp * kPitch<Kv, kDim>, scores);
  if (keys_left >= kTileKeys) return;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = warp_index() * kKeysPerWarp + tile * 8 + lane_member() * 2 + i % 2;
      if (key >= keys_left) scores[tile][i] = -INFINITY;
    }
  }
}

/* Probabilities of the 16 keys from 16 * step on, as the left operand. */
template <typename T>
__device__ __forceinline__ void load_probabilities(uint32_t (&a)[4], const T* probabilities, int step) {
  load_matrices(a, probabilities + lane_index() % 16 * kProbabilityPitch + lane_index() / 16 * 8 + step * 16);
}

/* Adds probabilities times values for this warp's columns. */
template <int kDim>
__device__ __forceinline__ void add_values(const bf16* probabilities, const bf16* v, Accumulator<kDim>& acc) {
  const bf16* from =
      v + lane_index() % 16 * kPitch<bf16, kDim> + warp_index() * (kDim / kWarps) + lane_index() / 16 * 8;
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    uint32_t a[4];
    load_probabilities(a, probabilities, step);
#pragma unroll
    for (int tile = 0; tile < Accumulator<kDim>::kTiles; tile += 2) {
      uint32_t b[4];
      load_matrices_transposed(b, from + step * 16 * kPitch<bf16, kDim> + tile * 8);
      mma_16x8x16<bf16>(acc.sums[tile], a, b[0], b[1]);
      mma_16x8x16<bf16>(acc.sums[tile + 1], a, b[2], b[3]);
    }
  }
}

/* 16 columns of FP8 values: codes[0] of eight keys, codes[1] of the next. */
__device__ __forceinline__ void add_codes(const uint32_t* codes, const uint32_t (&a)[4], float (&even)[4],
                                          float (&odd)[4]) {
  /* Codes of keys 2 m and 2 m + 1, two columns each: those of a column beside each other. */
  constexpr uint32_t kPairKeys = 0x3120;
  const uint32_t low = __byte_perm(codes[0], 0, kPairKeys);
  const uint32_t high = __byte_perm(codes[1], 0, kPairKeys);
  mma_16x8x16<f16>(even, a, low_fp8_to_f16x2(low), low_fp8_to_f16x2(high));
  mma_16x8x16<f16>(odd, a, high_fp8_to_f16x2(low), high_fp8_to_f16x2(high));
}

/* This warp's columns of 64 values as codes. 16 keys by 32 columns are loaded at once or, where the quarter is 16 columns, 32 keys by
 * 16 columns. */
template <int kDim>
struct ValueCodes {
  static constexpr bool kTwoSteps = kDim / kWarps == 16;
  static constexpr int kLoads = kTileKeys / 16 / (kTwoSteps ? 2 : 1);

  __device__ __forceinline__ explicit ValueCodes(const fp8* v) {
    const int upper = lane_index() / 16;
    const int key = lane_index() % 16 + (kTwoSteps ? upper * 16 : 0);
    const fp8* from = v + key * kPitch<fp8, kDim> + warp_index() * (kDim / kWarps) + (kTwoSteps ? 0 : upper * 16);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      load_matrices_transposed(codes[i], from + i * (kTileKeys / kLoads) * kPitch<fp8, kDim>);
    }
  }

  uint32_t codes[kLoads][4];
};

/* Likewise. */
template <int kDim>
__device__ __forceinline__ void add_values(const f16* probabilities, const ValueCodes<kDim>& v,
                                           Accumulator<kDim>& acc) {
  uint32_t a[kTileKeys / 16][4];
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) load_probabilities(a[step], probabilities, step);
#pragma unroll
  for (int i = 0; i < 2 * ValueCodes<kDim>::kLoads; ++i) {
    const int tile = i % (Accumulator<kDim>::kTiles / 2) * 2;
    add_codes(v.codes[i / 2] + i % 2 * 2, a[ValueCodes<kDim>::kTwoSteps ? i : i / 2], acc.sums[tile],
              acc.sums[tile + 1]);
  }
}

/* Calls f(row of the tile, column of the head, the sums of neighbouring columns from there on, half): two, or four over FP8. */
template <typename Kv, int kDim, typename F>
__device__ __forceinline__ void for_each_run(const Accumulator<kDim>& acc, int heads, F&& f) {
#pragma unroll
  for (int tile = 0; tile < Accumulator<kDim>::kTiles; tile += 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_group() + half * 8;
      if (row >= heads) continue;
      const float* low = acc.sums[tile] + 2 * half;
      const float* high = acc.sums[tile + 1] + 2 * half;
      const int first = warp_index() * (kDim / kWarps) + tile * 8;
      if constexpr (std::is_same_v<Kv, fp8>) {
        f(row, first + lane_member() * 4, make_float4(low[0], high[0], low[1], high[1]), half);
      } else {
        f(row, first + lane_member() * 2, make_float2(low[0], low[1]), half);
        f(row, first + 8 + lane_member() * 2, make_float2(high[0], high[1]), half);
      }
    }
  }
}

/* Likewise, two columns at a time. */
template <typename Kv, int kDim, typename F>
__device__ __forceinline__ void for_each_pair(const Accumulator<kDim>& acc, int heads, F&& f) {
  for_each_run<Kv, kDim>(acc, heads, [&](int row, int column, auto sums, int half) {
    f(row, column, make_float2(sums.x, sums.y), half);
    if constexpr (std::is_same_v<decltype(sums), float4>) f(row, column + 2, make_float2(sums.z, sums.w), half);
  });
}

}  // namespace glm::cuda

#endif
