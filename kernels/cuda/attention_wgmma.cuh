/* wgmma with the 64-row operand in registers (sm_90a), as attention multiplies: scores = q k^T and sums += weights v, with K and V as the
 * copy engine lays them: [head_dim / 64][64 keys][64 elements], 128-byte rows swizzled. */
#ifndef GLM_CUDA_ATTENTION_WGMMA_CUH
#define GLM_CUDA_ATTENTION_WGMMA_CUH

#include "attention_softmax.cuh"
#include "wgmma.cuh"

namespace glm::cuda {

constexpr int kColumnBlock = 64;                          /* elements of a swizzled row */
constexpr int kBlockBytes = kTileKeys * kColumnBlock * 2; /* 64 keys of them */

/* The lower half of a descriptor (swizzled_matrix), which holds the address: what lies `bytes` on is bytes / 16 more, so that one addition
 * makes a multiply's descriptor out of the tile's. */
__device__ __forceinline__ uint32_t keys_descriptor(const void* shared) {
  return static_cast<uint32_t>(swizzled_matrix(shared));
}

/* V as the right operand: its rows are k. The next 16 keys are 2,048 bytes on; 64 columns on, kBlockBytes. */
__device__ __forceinline__ uint32_t values_descriptor(const void* shared) {
  constexpr uint32_t kColumnStride = kBlockBytes >> 4;
  return (keys_descriptor(shared) & 0xffffu) | kColumnStride << 16;
}

__device__ __forceinline__ uint64_t whole_descriptor(uint32_t lower) {
  constexpr uint64_t kUpper = 1ull << 62 | 64ull << 32; /* 128-byte swizzle, groups of 8 rows 1,024 bytes apart */
  return kUpper | lower;
}

/* Keeps the compiler from moving accesses of these registers across this point. */
template <typename T, int N>
__device__ __forceinline__ void pin_registers(T (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(r[i])::"memory");
    } else {
      asm volatile("" : "+r"(r[i])::"memory");
    }
  }
}

#define GLM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GLM_D16(i) GLM_D4(i), GLM_D4(i + 4), GLM_D4(i + 8), GLM_D4(i + 12)
#define GLM_R0_31                                                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31"
#define GLM_R32_63                                                                                                   \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"

/* d[64][64] (+)= a b, b described by `b`; kTransposed: its rows are k. */
#define GLM_WGMMA_64(TYPES)                                                                              \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES \
               " {" GLM_R0_31 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;}"                                \
               : GLM_D16(0), GLM_D16(16)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposed))

template <typename T, int kTransposed>
__device__ __forceinline__ void wgmma_64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
#if GLM_HAS_WGMMA
  if constexpr (std::is_same_v<T, bf16>) {
    GLM_WGMMA_64("bf16.bf16");
  } else {
    GLM_WGMMA_64("f16.f16");
  }
#endif
}

/* d[64][128] += a b, rows of b are k. */
#define GLM_WGMMA_128(TYPES)                                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPES " {" GLM_R0_31 "," GLM_R32_63 \
               "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                                           \
               : GLM_D16(0), GLM_D16(16), GLM_D16(32), GLM_D16(48)                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <typename T>
__device__ __forceinline__ void wgmma_128_transposed(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
#if GLM_HAS_WGMMA
  if constexpr (std::is_same_v<T, bf16>) {
    GLM_WGMMA_128("bf16.bf16");
  } else {
    GLM_WGMMA_128("f16.f16");
  }
#endif
}

#undef GLM_WGMMA_64
#undef GLM_WGMMA_128
#undef GLM_D4
#undef GLM_D16
#undef GLM_R0_31
#undef GLM_R32_63

/* Starts scores = queries keys^T. */
template <typename T, int kDim>
__device__ __forceinline__ void start_scores(float (&scores)[kTileScores], const uint32_t (&queries)[kDim / 16][4],
                                             uint32_t keys) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    wgmma_64<T, 0>(scores, queries[step], whole_descriptor(keys + (step / 4 * kBlockBytes + step % 4 * 32) / 16),
                   step > 0);
  }
}

/* Starts sums += weights values. */
template <typename T, int kDim>
__device__ __forceinline__ void start_sums(float (&sums)[kDim / 2], const uint32_t (&weights)[kTileKeys / 16][4],
                                           uint32_t values) {
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    const uint64_t b = whole_descriptor(values + step * 2048 / 16);
    if constexpr (kDim == 128) {
      wgmma_128_transposed<T>(sums, weights[step], b);
    } else {
      wgmma_64<T, 1>(sums, weights[step], b, true);
    }
  }
}

}  // namespace glm::cuda

#endif
