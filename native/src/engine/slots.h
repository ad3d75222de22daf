// The caller's view of the slots: what is bound and which pages it has, as of the newest submitted step. Steps are
// checked against it, so that a kernel never meets a missing page or a free slot.
#pragma once

#include <cstdint>
#include <vector>

#include "glm/runtime.h"
#include "memory/limits.h"

namespace glm {

class SlotMirror {
 public:
  SlotMirror(const Limits& limits, int32_t vocab);

  void check_slot(const char* what, int32_t slot) const;
  bool bound(int32_t slot) const { return slots_[static_cast<size_t>(slot)].bound; }
  // Throws GLM_INVALID_ARGUMENT for values that glm_sampling does not allow, naming the field.
  void check_binding(int32_t slot, const glm_sampling& sampling, const int32_t* prompt, int32_t num_prompt,
                     const int32_t* sampled, int32_t num_sampled) const;
  void bind(int32_t slot);
  void release(int32_t slot);

  // -1: none.
  int32_t page(int32_t slot, int32_t index) const { return pages_[place(slot, index)]; }

  // All of a batch or, where it throws GLM_INVALID_ARGUMENT, nothing of it.
  void accept(const glm_step_batch& batch);

 private:
  struct Slot {
    bool bound = false;
    bool sampled = false;     // by a submitted step: it has a last token
    int32_t num_leading = 0;  // pages without a gap from position 0
    uint64_t step = 0;        // the newest batch that names it
  };
  struct Undo {
    int32_t slot;
    int32_t index;
    int32_t page;
    int32_t num_leading;
  };

  void check_counts(const glm_step_batch& batch) const;
  void check_plan(const glm_step_batch& batch) const;
  void check_updates(const glm_step_batch& batch) const;
  void apply_updates(const glm_step_batch& batch);
  void undo_updates();
  void check_sequences(const glm_step_batch& batch);
  void check_rows(const glm_step_batch& batch, int32_t seq);
  void check_samples(const glm_step_batch& batch) const;
  void note_samples(const glm_step_batch& batch);
  int32_t& page(int32_t slot, int32_t index) { return pages_[place(slot, index)]; }
  size_t place(int32_t slot, int32_t index) const {
    return static_cast<size_t>(slot) * num_pages_ + static_cast<size_t>(index);
  }

  Limits limits_;
  int32_t vocab_;
  size_t num_pages_;  // of a slot
  std::vector<Slot> slots_;
  std::vector<int32_t> pages_;  // [max_slots][num_pages_]; -1: none
  std::vector<Undo> undo_;
  uint64_t step_ = 0;
};

}  // namespace glm
