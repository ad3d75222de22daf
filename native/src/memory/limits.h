// The sizes that the caller chose at create: everything is allocated for these.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/plan.h"

namespace glm {

struct Limits {
  int32_t max_rows;     // T
  int32_t max_samples;  // S, and sequences of a step
  int32_t max_slots;
  int32_t max_context;
  int32_t num_pages;
  int32_t spare;  // slots and pages beyond those of the caller, for rows of padding: 1 or 0

  int32_t all_slots() const { return max_slots + spare; }
  int32_t spare_slot() const { return spare == 0 ? -1 : max_slots; }
  int32_t all_pages() const { return num_pages + spare; }
  int32_t max_decode_rows() const { return std::min(max_rows, max_samples); }
  int32_t max_pages() const { return max_context / GLM_PAGE_SIZE; }  // of one sequence

  int64_t rows_of(const RowCount& rows) const {
    const int32_t unit = rows.unit == RowUnit::kRows ? max_rows : rows.unit == RowUnit::kSamples ? max_samples : 1;
    return int64_t{rows.count} * unit;
  }
};

}  // namespace glm
