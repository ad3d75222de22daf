#ifndef GLM_CPU_ACTIVATIONS_H
#define GLM_CPU_ACTIVATIONS_H

#include "device.h"
#include "simd.h"
#include "tensor_access.h"
#include "weight_loader.h"

GLM_CPU_BEGIN

/* Every loader of weights takes at most this many columns at once; rows of x are padded to it with zeros. */
inline constexpr int32_t kPadCols = 4 * kLanes;

inline int64_t padded(int64_t cols) {
  return (cols + kPadCols - 1) / kPadCols * kPadCols;
}

/* Floats from one row of x to the next. Rows a multiple of 1 KiB apart would share the cache sets of their tile. */
inline int64_t activation_pitch(int64_t cols) {
  return padded(cols) % 256 == 0 ? padded(cols) + 272 : padded(cols);
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
  return static_cast<size_t>(rows * activation_pitch(cols));
}

/* One row of FP8 as Fp8Loader wants it: its vectors of each kPadCols columns, times 2^110; a NaN stays one. */
inline void load_fp8_row(const uint8_t* codes, int32_t cols, float* out) {
  for (int32_t k = 0; k < cols; k += kPadCols, out += kPadCols) {
    const int32_t left = cols - k;
    const auto raw = left < kPadCols ? fetch_first<Fp8Loader>(codes + k, left) : Fp8Loader::fetch(codes + k);
    unrolled<Fp8Loader::kVectors>([&](auto v) GLM_INLINE {
      const F32 value = Fp8Loader::expand<v>(raw);
      const I32 nan = ((reinterpret_cast<I32>(value) & 0x07f00000) == 0x07f00000) & 0x7fc00000;
      const F32 scaled = value * broadcast(0x1p120f) * broadcast(0x1p110f);
      store(out + v * kLanes, reinterpret_cast<F32>(reinterpret_cast<I32>(scaled) | nan));
    });
  }
}

inline void load_activation_row(const glm_tensor& x, int64_t t, float* out) {
  if (x.dtype == GLM_FP8_E4M3) return load_fp8_row(static_cast<const uint8_t*>(row_of(x, t)), x.cols, out);
  load_floats(row_of(x, t), x.dtype, out, x.cols);
  for (int64_t k = x.cols; k < padded(x.cols); ++k) out[k] = 0.0f;
}

/* Converts rows of x into `storage` (activation_floats of x's rows): rows 0 .. count - 1 or, if `listed` is given, its
 * `count` rows; the others are not read. */
inline Activations load_activations(ThreadPool& pool, const int32_t* listed, int64_t count, const glm_tensor& x,
                                    const glm_tensor& x_scale, float* storage) {
  constexpr int64_t kElementsPerChunk = 16384; /* a few microseconds: less is not worth waking a thread */
  const int64_t pitch = activation_pitch(x.cols);
  parallel_for(pool, count, kElementsPerChunk / pitch + 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = listed == nullptr ? i : listed[i];
      load_activation_row(x, t, storage + t * pitch);
    }
  });
  const bool scaled = x.dtype == GLM_FP8_E4M3;
  return {storage, pitch, scaled ? static_cast<const float*>(x_scale.data) : nullptr, x_scale.stride};
}

GLM_CPU_END

#endif
