// A step's inputs, its masks and its results, each one block of bytes laid out alike on host and device: one copy
// carries it.
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
  glm_step_inputs step;           // pointers into them; the counts are 0
  glm_page_update* page_updates;  // [all entries of all page tables]
  size_t result_bytes;
  size_t mask_words;  // of one mask

  // Of the inputs up to and with so many page updates.
  size_t input_bytes(int32_t num_page_updates) const {
    const auto fixed = static_cast<size_t>(reinterpret_cast<std::byte*>(page_updates) - inputs);
    return fixed + static_cast<size_t>(num_page_updates) * sizeof(glm_page_update);
  }
  size_t mask_bytes(int32_t num_masks) const { return static_cast<size_t>(num_masks) * mask_words * sizeof(uint32_t); }
};

// For the largest step, of a vocabulary of `vocab` tokens.
StepBlock make_step_block(const Limits& limits, int32_t vocab, Arena& arena);

}  // namespace glm
