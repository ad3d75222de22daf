// A step's inputs and its results, each one block of bytes laid out alike on host and device: one copy carries it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "glm/kernels.h"
#include "memory/arena.h"
#include "memory/limits.h"

namespace glm {

struct StepBlock {
  std::byte* inputs;  // token ids and so on, then page_updates, which come last
  std::byte* results;
  glm_step_inputs step;           // pointers into both; the counts are 0
  glm_page_update* page_updates;  // [all entries of all page tables]
  size_t result_bytes;

  // Of the inputs up to and with so many page updates.
  size_t input_bytes(int32_t num_page_updates) const {
    const auto fixed = static_cast<size_t>(reinterpret_cast<std::byte*>(page_updates) - inputs);
    return fixed + static_cast<size_t>(num_page_updates) * sizeof(glm_page_update);
  }
};

// For the largest step.
StepBlock make_step_block(const Limits& limits, Arena& arena);

}  // namespace glm
