#include "weights/convert.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace glm {
namespace {

float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// IEEE 754 binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits.
float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide_exponent = exponent == 0x1f ? 0xffu : exponent + (127 - 15);
  return std::bit_cast<float>(sign | (wide_exponent << 23) | (mantissa << 13));
}

template <float (*Convert)(uint16_t)>
void convert_halves(const std::byte* source, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, source + i * 2, sizeof(bits));
    out[i] = Convert(bits);
  }
}

}  // namespace

void convert_to_f32(const std::byte* source, glm_dtype dtype, int64_t count, float* out) {
  if (dtype == GLM_F32) {
    std::memcpy(out, source, static_cast<size_t>(count) * sizeof(float));
  } else if (dtype == GLM_BF16) {
    convert_halves<bf16_to_f32>(source, count, out);
  } else {
    convert_halves<f16_to_f32>(source, count, out);
  }
}

}  // namespace glm
