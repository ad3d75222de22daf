/* Weights as vectors of floats, in the order of their columns. */
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
  static constexpr float kScale = 1.0f; /* of a product with what `load` returns */
  static void load(const float* p, F32 (&out)[1]) { out[0] = cpu::load(p); }
};

struct Bf16Loader {
  using Element = uint16_t;
  static constexpr int kVectors = 1;
  static constexpr float kScale = 1.0f;
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

/* An E4M3 code moved to the sign, exponent and mantissa bits of an F16 is the same number times 2^-8, denormals
 * included: the exponent fields are 4 and 5 bits, the biases 7 and 15. The two NaN codes would read as +-480: weights
 * hold none. */
struct Fp8Loader {
  using Element = uint8_t;
#if defined(__AVX2__)
  static constexpr int kVectors = 2;
  static constexpr float kScale = 256.0f;
#else
  static constexpr int kVectors = 1;
  static constexpr float kScale = 1.0f;
#endif
  static void load(const uint8_t* p, F32 (&out)[kVectors]) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i half = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
    out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
#elif defined(__AVX2__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
#else
    out[0] = convert_lanes<static_cast<float (*)(uint8_t)>(fp8_decode)>(p);
#endif
  }
};

GLM_CPU_END

#endif
