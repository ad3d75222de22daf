// Weights that no file has: so that a model's shapes run, and are measured, without a checkpoint.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "glm/kernels.h"

namespace glm {

// Values that lie evenly in mean +- spread.
struct SyntheticValues {
  uint64_t seed = 0;
  float mean = 0;
  float spread = 0;
};

// A sequence of such values: element i is the same whoever asks for it, so slices of a tensor agree with the whole.
class Synthetic {
 public:
  // `dtype` is F32, BF16 or FP8_E4M3.
  Synthetic(const SyntheticValues& values, glm_dtype dtype);

  // Elements first .. first + count - 1.
  void write(int64_t first, int64_t count, std::byte* out) const;

 private:
  template <class Element>
  void write_as(int64_t first, int64_t count, std::byte* out) const;

  uint64_t seed_;
  size_t element_bytes_;
  std::array<uint32_t, 256> codes_;  // each value takes one of these: a random byte says which
};

}  // namespace glm
