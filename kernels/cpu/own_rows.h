/* The rows of a step that a rank has to itself. */
#ifndef GLM_CPU_OWN_ROWS_H
#define GLM_CPU_OWN_ROWS_H

#include <cstring>

#include "isa.h"
#include "tensor_access.h"

GLM_CPU_BEGIN

struct RowRange {
  int64_t begin;
  int64_t end;
};

inline RowRange own_rows(int64_t rows, int rank, int num_ranks) {
  return {rows * rank / num_ranks, rows * (rank + 1) / num_ranks};
}

inline void copy_row(const glm_tensor& from, const glm_tensor& to, int64_t row) {
  std::memcpy(row_of(to, row), row_of(from, row), static_cast<size_t>(to.cols) * dtype_bytes(to.dtype));
}

GLM_CPU_END

#endif
