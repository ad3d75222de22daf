/* A vector of floats, as wide as the instruction set has: the arithmetic operators are the compiler's own. */
#ifndef GLM_CPU_SIMD_H
#define GLM_CPU_SIMD_H

#include <cstdint>
#include <cstring>
#include <utility>

#include "isa.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

GLM_CPU_BEGIN

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

using F32 = float __attribute__((vector_size(kLanes * sizeof(float))));
using I32 = int32_t __attribute__((vector_size(kLanes * sizeof(float))));

inline F32 load(const float* p) {
  F32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, F32 v) {
  std::memcpy(p, &v, sizeof v);
}

/* The first n < kLanes floats, then zeros. */
inline F32 load_first(const float* p, int n) {
  F32 v = {};
  std::memcpy(&v, p, static_cast<size_t>(n) * sizeof(float));
  return v;
}

inline F32 broadcast(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return F32{x, x, x, x};
#endif
}

/* a * b + c: one rounding where the machine has it. */
inline F32 multiply_add(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

/* Keeps the compiler from loading v again and again as an operand of each use. */
inline void hold(F32& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#endif
}

/* Lanes added in a fixed tree. */
#if defined(__AVX2__)
inline float sum(__m256 v) {
  const __m256 pairs = _mm256_hadd_ps(v, v);
  const __m256 quads = _mm256_hadd_ps(pairs, pairs);
  return quads[0] + quads[4];
}
#endif
#if defined(__AVX512F__)
inline float sum(F32 v) {
  return sum(_mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1));
}
#elif !defined(__AVX2__)
inline float sum(F32 v) {
  return (v[0] + v[1]) + (v[2] + v[3]);
}
#endif

using F32x4 = float __attribute__((vector_size(16)));

/* sum(a), sum(b), sum(c), sum(d), with the same tree. */
[[gnu::always_inline]] inline F32x4 sum_four(F32 a, F32 b, F32 c, F32 d) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm256_castps256_ps128(quads) + _mm256_extractf128_ps(quads, 1);
#else
  return F32x4{sum(a), sum(b), sum(c), sum(d)};
#endif
}

/* f(0), f(1), ... f(N - 1), each with its argument as a compile-time constant: arrays indexed so live in registers,
 * where a loop that the optimiser unrolls would leave them in memory. */
template <int N, typename Function>
[[gnu::always_inline]] inline void unrolled(Function f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}
#define GLM_INLINE __attribute__((always_inline))

GLM_CPU_END

#endif
