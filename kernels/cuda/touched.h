/* The memory that a call reads and writes, of what calls write. */
#ifndef GLM_CUDA_TOUCHED_H
#define GLM_CUDA_TOUCHED_H

#include <cstddef>
#include <cstdint>

#include "glm/kernels.h"

namespace glm::cuda {

class Touched {
 public:
  Touched& reads(const glm_tensor& tensor, int64_t rows);
  Touched& reads(const void* data, size_t bytes);
  Touched& writes(const glm_tensor& tensor, int64_t rows);
  Touched& writes(const void* data, size_t bytes);

  /* Whether one writes what the other touches. */
  bool meets(const Touched& other) const;

 private:
  static constexpr int kMost = 9; /* moe_gate_up has as many */
  struct Range {
    uintptr_t begin;
    uintptr_t end;
    bool written;
  };

  Touched& add(const void* data, size_t bytes, bool written);

  Range ranges_[kMost] = {};
  int count_ = 0;
};

/* The last call that left room beside itself, and when that was. */
struct LastTurn {
  Touched touched;
  uint64_t launches = ~uint64_t{0}; /* of the device when it ended; at first none */
  bool ends_beside =
      false; /* its last kernel runs beside its predecessor: that may still run after its successor's start */
};

/* The last call of moe_group, when it was, and what the call beside which it ran touches. */
struct LastGrouping {
  glm_tensor ids = {};
  const int32_t* offsets = nullptr;
  const int32_t* order = nullptr;
  int32_t rows = 0;
  int32_t first = 0;
  uint64_t launches = ~uint64_t{0}; /* of the device when it ended; at first none */
  Touched beside = {};
};

}  // namespace glm::cuda

#endif
