#ifndef GLM_CPU_ACTIVATIONS_H
#define GLM_CPU_ACTIVATIONS_H

#include "device.h"
#include "tensor_access.h"

GLM_CPU_BEGIN

/* Every loader of weights takes at most this many columns at once; rows of x are padded to it with zeros. */
inline constexpr int32_t kPadCols = 32;

inline int64_t padded(int64_t cols) {
  return (cols + kPadCols - 1) / kPadCols * kPadCols;
}

/* The input of a matrix product as f32, converted once a call. */
struct Activations {
  const float* data;
  int64_t pitch;       /* floats from one row to the next */
  const float* scales; /* with FP8, else NULL */
  int64_t scale_stride;

  const float* row(int64_t t) const { return data + t * pitch; }
  const float* row_scales(int64_t t) const { return scales == nullptr ? nullptr : scales + t * scale_stride; }
};

inline size_t activation_floats(int64_t rows, int32_t cols) {
  return static_cast<size_t>(rows * padded(cols));
}

/* Converts rows of x into `storage` (activation_floats of x's rows): rows 0 .. count - 1 or, if `listed` is given, its
 * `count` rows; the others are not read. */
inline Activations load_activations(ThreadPool& pool, const int32_t* listed, int64_t count, const glm_tensor& x,
                                    const glm_tensor& x_scale, float* storage) {
  constexpr int64_t kElementsPerChunk = 16384; /* a few microseconds: less is not worth waking a thread */
  const int64_t pitch = padded(x.cols);
  parallel_for(pool, count, kElementsPerChunk / pitch + 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = listed == nullptr ? i : listed[i];
      float* row = storage + t * pitch;
      load_floats(row_of(x, t), x.dtype, row, x.cols);
      for (int64_t k = x.cols; k < pitch; ++k) row[k] = 0.0f;
    }
  });
  const bool scaled = x.dtype == GLM_FP8_E4M3;
  return {storage, pitch, scaled ? static_cast<const float*>(x_scale.data) : nullptr, x_scale.stride};
}

GLM_CPU_END

#endif
