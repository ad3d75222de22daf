/* A vector of floats, as wide as the instruction set has: the arithmetic operators are the compiler's own. */
#ifndef GLM_CPU_SIMD_H
#define GLM_CPU_SIMD_H

#include <cstdint>
#include <cstring>

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

/* out[i] = sum(v[i]), with the same tree. */
inline void sum_four(const F32* v, float* out) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  _mm_storeu_ps(out, _mm256_castps256_ps128(quads) + _mm256_extractf128_ps(quads, 1));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
}

GLM_CPU_END

#endif
