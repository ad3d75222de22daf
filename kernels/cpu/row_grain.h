#ifndef GLM_CPU_ROW_GRAIN_H
#define GLM_CPU_ROW_GRAIN_H

#include <cstdint>

#include "isa.h"

GLM_CPU_BEGIN

/* Rows of `cols` elements that make a chunk worth handing to another thread. */
inline int64_t row_grain(int64_t cols) {
  return cols >= 2048 ? 1 : 2048 / (cols < 1 ? 1 : cols);
}

GLM_CPU_END

#endif
