/* Weights as vectors of floats. */
#ifndef GLM_CPU_WEIGHT_LOADER_H
#define GLM_CPU_WEIGHT_LOADER_H

#include "simd.h"
#include "tensor_access.h"

GLM_CPU_BEGIN

/* A loader fetches kVectors * kLanes elements and expands them a vector at a time. */
template <typename Loader>
inline typename Loader::Raw fetch_first(const typename Loader::Element* p, int n) {
  typename Loader::Element padded[Loader::kVectors * kLanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(n) * sizeof(typename Loader::Element));
  return Loader::fetch(padded);
}

#if !defined(__AVX2__)
template <auto convert, typename Element>
inline F32 convert_lanes(const Element* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = convert(p[i]);
  return load(lanes);
}
#endif

/* A vector of elements is one of floats. */
struct PlainLoader {
  using Raw = F32;
  static constexpr int kVectors = 1;
  template <int>
  static F32 expand(F32 raw) {
    return raw;
  }
};

struct F32Loader : PlainLoader {
  using Element = float;
  static constexpr float kScale = 1.0f;        /* of a product with what `load` returns */
  static constexpr bool kAlwaysFinite = false; /* whatever the bits: times a zero of x they add nothing */
  static F32 fetch(const float* p) { return cpu::load(p); }
  template <int>
  static F32 expand_at(const float* p) {
    return fetch(p);
  }
};

struct Bf16Loader : PlainLoader {
  using Element = uint16_t;
  static constexpr float kScale = 1.0f;
  static constexpr bool kAlwaysFinite = false;
  static F32 fetch(const uint16_t* p) {
#if defined(__AVX512F__)
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
#elif defined(__AVX2__)
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
#else
    return convert_lanes<bf16_to_f32>(p);
#endif
  }
  template <int>
  static F32 expand_at(const uint16_t* p) {
    return fetch(p);
  }
};

struct F16Loader : PlainLoader {
  using Element = uint16_t;
  static constexpr float kScale = 1.0f;
  static constexpr bool kAlwaysFinite = false;
  static F32 fetch(const uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    return convert_lanes<f16_to_f32>(p);
#endif
  }
  template <int>
  static F32 expand_at(const uint16_t* p) {
    return fetch(p);
  }
};

/* A vector of codes gives four of floats, which hold the columns 4 * lane + 0, 2, 1 and 3 (load_activations arranges x alike). With its sign,
 * exponent and mantissa where a float has them, a code is the same number times 2^-120, denormals included: the fields are 4 and 8
 * bits wide, the biases 7 and 127. x carries 2^110 in return. The two NaN codes would read as +-480: weights hold none. */
struct Fp8Loader {
  using Element = uint8_t;
  static constexpr int kVectors = 4;
  static constexpr float kScale = 0x1p10f;
  static constexpr bool kAlwaysFinite = true;
  using Raw = int16_t __attribute__((vector_size(sizeof(F32))));
  static Raw fetch(const uint8_t* p) {
    Raw codes;
    std::memcpy(&codes, p, sizeof codes);
    return codes;
  }
  /* Two of the vectors share an operation. */
  template <int kVector>
  static F32 expand(Raw codes) {
    return expand_half<kVector % 2>((kVector < 2 ? codes << 8 : codes) >> 4);
  }
  /* The codes at p that the vectors 2 * kSecond and 2 * kSecond + 1 hold, a code in the high bits of each word: 16 times a
   * signed byte, the other byte times 0. A product runs on other units than shifts, of which two more would be needed. */
  template <int kSecond>
  static Raw fetch_half(const uint8_t* p) {
    const Raw codes = fetch(p);
#if defined(__AVX512F__)
    const __m512i sixteen = _mm512_set1_epi16(kSecond ? 16 << 8 : 16);
    return reinterpret_cast<Raw>(_mm512_maddubs_epi16(sixteen, reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
    const __m256i sixteen = _mm256_set1_epi16(kSecond ? 16 << 8 : 16);
    return reinterpret_cast<Raw>(_mm256_maddubs_epi16(sixteen, reinterpret_cast<__m256i>(codes)));
#else
    return (kSecond ? codes : codes << 8) >> 4;
#endif
  }
  /* The first or the second vector of `half`. */
  template <int kVector>
  static F32 expand_half(Raw half) {
    const I32 pair = reinterpret_cast<I32>(half);
    return reinterpret_cast<F32>((kVector == 0 ? pair << 16 : pair) & kFields);
  }
  /* One vector of those at p, in the fewest operations and registers; volatile, so that no register keeps the codes. */
  template <int kVector>
  static F32 expand_at(const uint8_t* p) {
    using Unaligned = int32_t __attribute__((vector_size(sizeof(F32)), aligned(1), may_alias));
    constexpr int kColumn = kVector == 1 ? 2 : kVector == 2 ? 1 : kVector;
    const I32 codes = *reinterpret_cast<const volatile Unaligned*>(p);
    return reinterpret_cast<F32>((codes << (24 - 8 * kColumn)) >> 4 & kFields);
  }

 private:
  static constexpr int32_t kFields = static_cast<int32_t>(0x87f00000);
};

GLM_CPU_END

#endif
