/* Weights as vectors of floats. */
#ifndef GLM_CPU_WEIGHT_LOADER_H
#define GLM_CPU_WEIGHT_LOADER_H

#include "simd.h"
#include "tensor_access.h"

GLM_CPU_BEGIN

/* A loader reads kVectors * kLanes elements; load_first reads n of them and takes zeros for the rest. */
template <typename Loader, typename Element, int kVectors>
inline void load_first_elements(const Element* p, int n, F32 (&out)[kVectors]) {
  Element padded[kVectors * kLanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(n) * sizeof(Element));
  Loader::load(padded, out);
}

#if !defined(__AVX2__)
template <auto convert, typename Element>
inline F32 convert_lanes(const Element* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = convert(p[i]);
  return load(lanes);
}
#endif

struct F32Loader {
  using Element = float;
  static constexpr int kVectors = 1;
  static constexpr float kScale = 1.0f;        /* of a product with what `load` returns */
  static constexpr bool kAlwaysFinite = false; /* whatever the bits: times a zero of x they add nothing */
  static void load(const float* p, F32 (&out)[1]) { out[0] = cpu::load(p); }
};

struct Bf16Loader {
  using Element = uint16_t;
  static constexpr int kVectors = 1;
  static constexpr float kScale = 1.0f;
  static constexpr bool kAlwaysFinite = false;
  static void load(const uint16_t* p, F32 (&out)[1]) {
#if defined(__AVX512F__)
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
#elif defined(__AVX2__)
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
#else
    out[0] = convert_lanes<bf16_to_f32>(p);
#endif
  }
};

struct F16Loader {
  using Element = uint16_t;
  static constexpr int kVectors = 1;
  static constexpr float kScale = 1.0f;
  static constexpr bool kAlwaysFinite = false;
  static void load(const uint16_t* p, F32 (&out)[1]) {
#if defined(__AVX512F__)
    out[0] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    out[0] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    out[0] = convert_lanes<f16_to_f32>(p);
#endif
  }
};

/* A vector of codes gives four of floats; vector j holds the columns 4 * lane + j (load_activations arranges x alike). With its sign,
 * exponent and mantissa where a float has them, a code is the same number times 2^-120, denormals included: the fields are 4 and 8
 * bits wide, the biases 7 and 127. x carries 2^110 in return. The two NaN codes would read as +-480: weights hold none. */
struct Fp8Loader {
  using Element = uint8_t;
  static constexpr int kVectors = 4;
  static constexpr float kScale = 0x1p10f;
  static constexpr bool kAlwaysFinite = true;
  static void load(const uint8_t* p, F32 (&out)[4]) {
    using I16 = int16_t __attribute__((vector_size(sizeof(F32))));
    I16 codes;
    std::memcpy(&codes, p, sizeof codes);
    const I32 even = reinterpret_cast<I32>((codes << 8) >> 4);
    const I32 odd = reinterpret_cast<I32>(codes >> 4);
    const I32 fields = I32{} + static_cast<int32_t>(0x87f00000);
    out[0] = reinterpret_cast<F32>((even << 16) & fields);
    out[1] = reinterpret_cast<F32>((odd << 16) & fields);
    out[2] = reinterpret_cast<F32>(even & fields);
    out[3] = reinterpret_cast<F32>(odd & fields);
  }
};

GLM_CPU_END

#endif
