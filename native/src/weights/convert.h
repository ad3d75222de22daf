// Checkpoint floats as f32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "glm/kernels.h"

namespace glm {

// dtype is F32, BF16 or F16; every value of them is exact in f32.
void convert_to_f32(const std::byte* source, glm_dtype dtype, int64_t count, float* out);

}  // namespace glm
