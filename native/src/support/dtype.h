// Sizes and spellings of element types.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "glm/kernels.h"

namespace glm {

constexpr size_t element_bytes(glm_dtype dtype) {
  switch (dtype) {
    case GLM_F32:
    case GLM_I32:
      return 4;
    case GLM_BF16:
    case GLM_F16:
    case GLM_U16:
      return 2;
    case GLM_FP8_E4M3:
      return 1;
  }
  return 0;
}

// As the plan text spells them.
constexpr std::string_view dtype_name(glm_dtype dtype) {
  constexpr std::array<std::string_view, 6> names = {"f32", "bf16", "f16", "fp8", "i32", "u16"};
  return names[dtype];
}

constexpr std::string_view format_name(glm_weight_format format) {
  constexpr std::array<std::string_view, 5> names = {"f32", "bf16", "f16", "fp8_channel", "fp8_block"};
  return names[format];
}

constexpr bool is_fp8(glm_weight_format format) {
  return format == GLM_W_FP8_CHANNEL || format == GLM_W_FP8_BLOCK;
}

// What a tensor of this format is stored as.
constexpr glm_dtype storage_dtype(glm_weight_format format) {
  constexpr std::array<glm_dtype, 5> dtypes = {GLM_F32, GLM_BF16, GLM_F16, GLM_FP8_E4M3, GLM_FP8_E4M3};
  return dtypes[format];
}

constexpr int32_t blocks(int64_t size) {
  return static_cast<int32_t>((size + GLM_FP8_BLOCK - 1) / GLM_FP8_BLOCK);
}

}  // namespace glm
