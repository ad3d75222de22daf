#ifndef GLM_CPU_QUANTIZE_ROW_H
#define GLM_CPU_QUANTIZE_ROW_H

#include <bit>
#include <cstdint>

#include "fp8.h"
#include "isa.h"

GLM_CPU_BEGIN

/* One group: returns its scale, absmax / 448; 1 where that is zero. A NaN makes the scale NaN. */
inline float quantize_group(const float* x, int32_t n, uint8_t* q) {
  /* On magnitudes the order of floats is that of their bits, with NaN on top. */
  uint32_t absmax = 0;
  for (int32_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    absmax = magnitude > absmax ? magnitude : absmax;
  }
  float scale = std::bit_cast<float>(absmax) / GLM_FP8_MAX;
  scale = scale == 0.0f ? 1.0f : scale;
  for (int32_t i = 0; i < n; ++i) q[i] = fp8_encode(x[i] / scale);
  return scale;
}

/* A row of f32 values (already rounded to act) as glm_quantize_args says: one scale for the row if scale_cols is 1,
 * else one for each 128 columns. q: [cols]; scale: [scale_cols]. */
inline void quantize_row(const float* x, int32_t cols, int32_t scale_cols, uint8_t* q, float* scale) {
  const int32_t group = scale_cols == 1 ? cols : GLM_FP8_BLOCK;
  for (int32_t g = 0; g < scale_cols; ++g) {
    const int32_t begin = g * group;
    const int32_t n = cols - begin < group ? cols - begin : group;
    scale[g] = quantize_group(x + begin, n, q + begin);
  }
}

GLM_CPU_END

#endif
