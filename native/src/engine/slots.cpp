#include "engine/slots.h"

#include <algorithm>

#include "support/error.h"

namespace glm {
namespace {

template <class... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  fail(GLM_INVALID_ARGUMENT, parts...);
}

void check_range(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) invalid(what, " ", value, ", expected ", low, " to ", high);
}

void check_range(const char* what, int64_t index, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) invalid(what, "[", index, "] ", value, ", expected ", low, " to ", high);
}

bool is_forced(const glm_step_batch& batch, int32_t sample) {
  return batch.forced_tokens != nullptr && batch.forced_tokens[sample] >= 0;
}

}  // namespace

SlotMirror::SlotMirror(const Limits& limits, int32_t vocab)
    : limits_(limits), vocab_(vocab), num_pages_(static_cast<size_t>(limits.max_pages())) {
  slots_.resize(static_cast<size_t>(limits.max_slots));
  pages_.assign(slots_.size() * num_pages_, -1);
  undo_.reserve(pages_.size());
}

void SlotMirror::check_slot(const char* what, int32_t slot) const {
  check_range(what, slot, 0, limits_.max_slots - 1);
}

void SlotMirror::bind(int32_t slot) {
  slots_[static_cast<size_t>(slot)].bound = true;
}

void SlotMirror::release(int32_t slot) {
  slots_[static_cast<size_t>(slot)] = Slot{};
  std::fill_n(&page(slot, 0), num_pages_, -1);
}

void SlotMirror::accept(const glm_step_batch& batch) {
  check_counts(batch);
  check_plan(batch);
  check_updates(batch);
  apply_updates(batch);
  try {
    ++step_;
    check_sequences(batch);
    check_samples(batch);
  } catch (...) {
    undo_updates();
    throw;
  }
  note_samples(batch);
}

void SlotMirror::check_counts(const glm_step_batch& batch) const {
  check_range("num_rows", batch.num_rows, 0, limits_.max_rows);
  check_range("num_seqs", batch.num_seqs, 0, std::min(batch.num_rows, limits_.max_samples));
  check_range("num_samples", batch.num_samples, 0, std::min(batch.num_rows, limits_.max_samples));
  check_range("num_masks", batch.num_masks, 0, batch.num_samples);
  check_range("num_page_updates", batch.num_page_updates, 0, static_cast<int64_t>(pages_.size()));
  const auto check_array = [](const char* name, const void* array, int32_t count) {
    if (array == nullptr && count > 0) invalid(name, " is NULL, expected ", count, " elements");
  };
  check_array("token_ids", batch.token_ids, batch.num_rows);
  check_array("positions", batch.positions, batch.num_rows);
  check_array("seq_slots", batch.seq_slots, batch.num_seqs);
  check_array("seq_starts", batch.seq_starts, batch.num_seqs + 1);
  check_array("sample_rows", batch.sample_rows, batch.num_samples);
  check_array("page_updates", batch.page_updates, batch.num_page_updates);
}

void SlotMirror::check_plan(const glm_step_batch& batch) const {
  check_range("plan", batch.plan, GLM_PLAN_MIXED, GLM_PLAN_DECODE);
  const bool one_each = batch.num_rows == batch.num_seqs && batch.num_rows == batch.num_samples;
  if (batch.plan == GLM_PLAN_DECODE && !one_each) {
    invalid("plan decode with ", batch.num_rows, " rows, ", batch.num_seqs, " sequences and ", batch.num_samples,
            " samples, expected one row a sequence, every row sampled");
  }
}

void SlotMirror::check_updates(const glm_step_batch& batch) const {
  for (int32_t i = 0; i < batch.num_page_updates; ++i) {
    const glm_page_update& update = batch.page_updates[i];
    check_range("page_updates.slot", i, update.slot, 0, limits_.max_slots - 1);
    check_range("page_updates.index", i, update.index, 0, limits_.max_pages() - 1);
    check_range("page_updates.page", i, update.page, 0, limits_.num_pages - 1);
    if (!bound(update.slot)) invalid("page_updates[", i, "]: slot ", update.slot, " is not bound");
  }
}

void SlotMirror::apply_updates(const glm_step_batch& batch) {
  undo_.clear();
  for (int32_t i = 0; i < batch.num_page_updates; ++i) {
    const glm_page_update& update = batch.page_updates[i];
    Slot& slot = slots_[static_cast<size_t>(update.slot)];
    undo_.push_back({update.slot, update.index, page(update.slot, update.index), slot.num_leading});
    page(update.slot, update.index) = update.page;
    while (slot.num_leading < limits_.max_pages() && page(update.slot, slot.num_leading) >= 0) ++slot.num_leading;
  }
}

void SlotMirror::undo_updates() {
  for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo) {
    page(undo->slot, undo->index) = undo->page;
    slots_[static_cast<size_t>(undo->slot)].num_leading = undo->num_leading;
  }
}

void SlotMirror::check_sequences(const glm_step_batch& batch) {
  if (batch.seq_starts[0] != 0) invalid("seq_starts[0] ", batch.seq_starts[0], ", expected 0");
  for (int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    const int32_t end = batch.seq_starts[seq + 1];
    check_range("seq_starts", seq + 1, end, int64_t{batch.seq_starts[seq]} + 1, batch.num_rows);
    const int32_t slot = batch.seq_slots[seq];
    check_range("seq_slots", seq, slot, 0, limits_.max_slots - 1);
    Slot& state = slots_[static_cast<size_t>(slot)];
    if (!state.bound) invalid("seq_slots[", seq, "]: slot ", slot, " is not bound");
    if (state.step == step_) invalid("seq_slots[", seq, "]: slot ", slot, " is in the step twice");
    state.step = step_;
    check_rows(batch, seq);
  }
  if (batch.seq_starts[batch.num_seqs] != batch.num_rows) {
    invalid("seq_starts[", batch.num_seqs, "] ", batch.seq_starts[batch.num_seqs], ", expected num_rows ",
            batch.num_rows);
  }
}

void SlotMirror::check_rows(const glm_step_batch& batch, int32_t seq) {
  const int32_t begin = batch.seq_starts[seq];
  const int32_t end = batch.seq_starts[seq + 1];
  const int32_t slot = batch.seq_slots[seq];
  const Slot& state = slots_[static_cast<size_t>(slot)];
  const int32_t first = batch.positions[begin];
  check_range("positions", begin, first, 0, limits_.max_context - 1);
  for (int32_t row = begin; row < end; ++row) {
    check_range("token_ids", row, batch.token_ids[row], -1, vocab_ - 1);
    if (batch.token_ids[row] == -1 && !state.sampled) {
      invalid("token_ids[", row, "] -1, but no step has sampled a token for slot ", slot);
    }
    if (batch.positions[row] != first + (row - begin)) {
      invalid("positions[", row, "] ", batch.positions[row], ", expected ", first + (row - begin),
              ": a sequence's positions are consecutive");
    }
  }
  const int64_t last = int64_t{first} + (end - 1 - begin);
  if (last >= limits_.max_context) {
    invalid("positions[", end - 1, "] ", last, ", expected at most ", limits_.max_context - 1);
  }
  if (last / GLM_PAGE_SIZE >= state.num_leading) {
    invalid("positions[", end - 1, "] ", last, ": slot ", slot, " has no page for index ", state.num_leading);
  }
}

void SlotMirror::check_samples(const glm_step_batch& batch) const {
  int32_t seq = 0;  // the first sequence that the next sample may belong to
  for (int32_t i = 0; i < batch.num_samples; ++i) {
    const int32_t row = batch.sample_rows[i];
    check_range("sample_rows", i, row, i > 0 ? int64_t{batch.sample_rows[i - 1]} + 1 : 0, batch.num_rows - 1);
    if (row < batch.seq_starts[seq]) invalid("sample_rows[", i, "] ", row, ": its sequence has been sampled");
    while (row >= batch.seq_starts[seq + 1]) ++seq;
    if (!is_forced(batch, i)) ++seq;
    if (batch.forced_tokens != nullptr) check_range("forced_tokens", i, batch.forced_tokens[i], -1, vocab_ - 1);
    if (batch.sample_masks != nullptr) check_range("sample_masks", i, batch.sample_masks[i], -1, batch.num_masks - 1);
  }
}

void SlotMirror::note_samples(const glm_step_batch& batch) {
  for (int32_t i = 0, seq = 0; i < batch.num_samples; ++i) {
    if (is_forced(batch, i)) continue;
    while (batch.sample_rows[i] >= batch.seq_starts[seq + 1]) ++seq;
    slots_[static_cast<size_t>(batch.seq_slots[seq])].sampled = true;
  }
}

}  // namespace glm
