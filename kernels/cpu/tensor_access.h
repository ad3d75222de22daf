/* Rows of any float dtype to and from f32. Loops are plain so that the compiler vectorises them. */
#ifndef GLM_CPU_TENSOR_ACCESS_H
#define GLM_CPU_TENSOR_ACCESS_H

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fp8.h"
#include "isa.h"

GLM_CPU_BEGIN

inline float bf16_to_f32(uint16_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

/* Nearest even; NaN stays NaN. */
inline uint16_t f32_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

inline float f16_to_f32(uint16_t x) {
  const uint32_t sign = (x & 0x8000u) << 16;
  const uint32_t magnitude = x & 0x7fffu;
  const float normal = std::bit_cast<float>((magnitude << 13) + (112u << 23));
  const float denormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const float special = std::bit_cast<float>((magnitude << 13) | 0x7f800000u);
  float value = magnitude < 0x400u ? denormal : normal;
  value = magnitude >= 0x7c00u ? special : value;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

inline size_t dtype_bytes(glm_dtype dtype) {
  switch (dtype) {
    case GLM_FP8_E4M3:
      return 1;
    case GLM_BF16:
    case GLM_F16:
    case GLM_U16:
      return 2;
    default:
      return 4;
  }
}

/* Address of row `row` of a tensor. */
inline void* row_of(const glm_tensor& tensor, int64_t row) {
  return static_cast<std::byte*>(tensor.data) + row * tensor.stride * static_cast<int64_t>(dtype_bytes(tensor.dtype));
}

/* n values of a float dtype at `in`. */
inline void load_floats(const void* in, glm_dtype dtype, float* out, int64_t n) {
  const auto* u16 = static_cast<const uint16_t*>(in);
  switch (dtype) {
    case GLM_BF16:
      for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(u16[i]);
      return;
    case GLM_F16:
      for (int64_t i = 0; i < n; ++i) out[i] = f16_to_f32(u16[i]);
      return;
    case GLM_FP8_E4M3:
      fp8_decode(static_cast<const uint8_t*>(in), out, static_cast<size_t>(n));
      return;
    default:
      std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
      return;
  }
}

/* n values to an act dtype (f32 or bf16). */
inline void store_act(const float* in, glm_dtype dtype, void* out, int64_t n) {
  if (dtype == GLM_BF16) {
    auto* u16 = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < n; ++i) u16[i] = f32_to_bf16(in[i]);
  } else {
    std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
  }
}

/* x as it reads back after a store to an act dtype. */
inline float round_to_act(float x, glm_dtype dtype) {
  return dtype == GLM_BF16 ? bf16_to_f32(f32_to_bf16(x)) : x;
}

GLM_CPU_END

#endif
