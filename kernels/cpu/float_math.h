/* exp, log and silu in f32 without branches, so that loops over them vectorise. Polynomials: Moshier, Cephes expf and
 * logf (about 2 ulp). */
#ifndef GLM_CPU_FLOAT_MATH_H
#define GLM_CPU_FLOAT_MATH_H

#include <bit>
#include <cstdint>

#include "isa.h"

GLM_CPU_BEGIN

/* 0 below -87 (results would be denormal); x is held to 88, where exp is 1.7e38; NaN stays NaN. */
inline float exp_f32(float x) {
  const float held = x > 88.0f ? 88.0f : x;
  /* Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits. */
  const float shifted = held * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (held - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) - 0x4b400000u + 127u) << 23;
  const float value = p * std::bit_cast<float>(exponent);
  return x < -87.0f ? 0.0f : value;
}

/* x must be normal and positive. */
inline float log_f32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  /* Mantissa in [sqrt(1/2), sqrt(2)): small results keep their relative precision. */
  const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float mantissa = std::bit_cast<float>(bits - (static_cast<uint32_t>(exponent) << 23));
  const float n = static_cast<float>(exponent);
  const float f = mantissa - 1.0f;
  const float square = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const float tail = (p * f) * square - n * 2.12194440e-4f;
  return ((tail - 0.5f * square) + f) + n * 0.693359375f;
}

inline float silu_f32(float x) {
  return x / (1.0f + exp_f32(-x));
}

GLM_CPU_END

#endif
