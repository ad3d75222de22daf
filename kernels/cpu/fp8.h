/* FP8 E4M3 ("fn"): exact both ways. Branch-free, so that loops over these vectorise. */
#ifndef GLM_CPU_FP8_H
#define GLM_CPU_FP8_H

#include <bit>
#include <cstddef>
#include <cstdint>

#include "isa.h"

GLM_CPU_BEGIN

/* Nearest even; beyond 448 (and infinity) saturates; NaN keeps its sign. */
inline uint8_t fp8_encode(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  /* 2^14 has an ulp of 2^-9, the spacing of FP8 denormals: the addition itself rounds. Its sum carries into the first
   * normal. */
  const float denormal = std::bit_cast<float>(magnitude) + 16384.0f;
  const uint32_t low = std::bit_cast<uint32_t>(denormal) - 0x46800000u;
  /* 20 mantissa bits go; the exponent's bias goes from 127 to 7. */
  const uint32_t rounded = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  uint32_t code = rounded - (120u << 3);
  code = magnitude < 0x3c800000u ? low : code;    /* below 2^-6 */
  code = magnitude >= 0x43e80000u ? 0x7eu : code; /* 464, half way past 448, and up */
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return static_cast<uint8_t>(code | ((bits >> 24) & 0x80u));
}

inline float fp8_decode(uint8_t code) {
  const uint32_t sign = (code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  const float normal = std::bit_cast<float>((magnitude << 20) + (120u << 23));
  const float denormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  float value = magnitude < 8u ? denormal : normal;
  value = magnitude == 0x7fu ? std::bit_cast<float>(0x7fc00000u) : value;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

inline void fp8_encode(const float* in, uint8_t* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = fp8_encode(in[i]);
}

inline void fp8_decode(const uint8_t* in, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = fp8_decode(in[i]);
}

GLM_CPU_END

#endif
