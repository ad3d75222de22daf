/* RMSNorm of one row (Zhang & Sennrich 2019). */
#ifndef GLM_CPU_NORM_ROW_H
#define GLM_CPU_NORM_ROW_H

#include <cmath>
#include <cstdint>

#include "simd.h"
#include "tensor_access.h"

GLM_CPU_BEGIN

inline float sum_of_squares(const float* x, int32_t n) {
  F32 sums[4] = {};
  int32_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const F32 v = load(x + i + j * kLanes);
      sums[j] = multiply_add(v, v, sums[j]);
    }
  }
  for (; i < n; i += kLanes) {
    const F32 v = n - i < kLanes ? load_first(x + i, n - i) : load(x + i);
    sums[0] = multiply_add(v, v, sums[0]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* y = weight * act(x / rms(x)), rounded to act; y may be x. */
inline void normalize_row(const float* x, const float* weight, int32_t n, float eps, glm_dtype act, float* y) {
  const float inverse_rms = 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
  for (int32_t i = 0; i < n; ++i) y[i] = round_to_act(weight[i] * round_to_act(x[i] * inverse_rms, act), act);
}

GLM_CPU_END

#endif
