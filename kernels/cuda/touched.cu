#include "numeric.cuh"
#include "touched.h"

namespace glm::cuda {

namespace {

size_t bytes_of_rows(const glm_tensor& tensor, int64_t rows) {
  if (tensor.data == nullptr || rows == 0) return 0;
  return static_cast<size_t>((rows - 1) * tensor.stride + tensor.cols) * bytes_of(tensor.dtype);
}

}  // namespace

Touched& Touched::add(const void* data, size_t bytes, bool written) {
  if (bytes == 0) return *this;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  ranges_[count_++] = {begin, begin + bytes, written};
  return *this;
}

Touched& Touched::reads(const glm_tensor& tensor, int64_t rows) {
  return add(tensor.data, bytes_of_rows(tensor, rows), false);
}

Touched& Touched::reads(const void* data, size_t bytes) {
  return add(data, bytes, false);
}

Touched& Touched::writes(const glm_tensor& tensor, int64_t rows) {
  return add(tensor.data, bytes_of_rows(tensor, rows), true);
}

Touched& Touched::writes(const void* data, size_t bytes) {
  return add(data, bytes, true);
}

bool Touched::meets(const Touched& other) const {
  for (int i = 0; i < count_; ++i) {
    for (int j = 0; j < other.count_; ++j) {
      const Range& own = ranges_[i];
      const Range& its = other.ranges_[j];
      if ((own.written || its.written) && own.begin < its.end && its.begin < own.end) return true;
    }
  }
  return false;
}

}  // namespace glm::cuda
