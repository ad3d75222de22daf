#include "weights/synthetic.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "support/dtype.h"

namespace glm {
namespace {

constexpr int64_t kLanes = sizeof(uint64_t);  // values of one random word

// Word `index` of the sequence that `seed` names. Source: Steele, Lea, Flood 2014 (SplitMix64).
uint64_t random_word(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// To nearest even, finite values only.
uint32_t encode_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// To nearest even, saturating. A mantissa that rounds up to 16 carries into the exponent, as it should.
uint32_t encode_fp8(float value) {
  const uint32_t sign = std::signbit(value) ? 0x80u : 0u;
  const float magnitude = std::min(std::abs(value), GLM_FP8_MAX);
  const int exponent = magnitude == 0 ? -6 : std::max(-6, std::ilogb(magnitude));
  const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | static_cast<uint32_t>(((exponent + 6) << 3) + mantissa);
}

uint32_t encode(float value, glm_dtype dtype) {
  if (dtype == GLM_FP8_E4M3) return encode_fp8(value);
  return dtype == GLM_BF16 ? encode_bf16(value) : std::bit_cast<uint32_t>(value);
}

}  // namespace

Synthetic::Synthetic(const SyntheticValues& values, glm_dtype dtype)
    : seed_(values.seed), element_bytes_(element_bytes(dtype)) {
  for (size_t i = 0; i < codes_.size(); ++i) {
    const float at = (2 * static_cast<float>(i) + 1) / static_cast<float>(codes_.size()) - 1;
    codes_[i] = encode(values.mean + values.spread * at, dtype);
  }
}

void Synthetic::write(int64_t first, int64_t count, std::byte* out) const {
  if (element_bytes_ == 1) {
    write_as<uint8_t>(first, count, out);
  } else if (element_bytes_ == 2) {
    write_as<uint16_t>(first, count, out);
  } else {
    write_as<uint32_t>(first, count, out);
  }
}

template <class Element>
void Synthetic::write_as(int64_t first, int64_t count, std::byte* out) const {
  const auto emit = [&](int64_t begin, int64_t lanes) {
    const uint64_t at = static_cast<uint64_t>(first + begin);
    uint64_t word = random_word(seed_, at / kLanes) >> (8 * (at % kLanes));
    for (int64_t lane = 0; lane < lanes; ++lane, word >>= 8) {
      const Element code = static_cast<Element>(codes_[word & 0xff]);
      std::memcpy(out + (begin + lane) * static_cast<int64_t>(sizeof(Element)), &code, sizeof(Element));
    }
  };
  int64_t done = std::min(count, (kLanes - first % kLanes) % kLanes);
  if (done > 0) emit(0, done);
  for (; done + kLanes <= count; done += kLanes) emit(done, kLanes);
  if (done < count) emit(done, count - done);
}

}  // namespace glm
