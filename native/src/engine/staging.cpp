#include "engine/staging.h"

#include <algorithm>

namespace glm {
namespace {

// -1 each where there are none.
void fill_choices(const int32_t* from, int32_t count, int32_t* to) {
  if (from == nullptr) {
    std::fill_n(to, count, -1);
  } else {
    std::copy_n(from, count, to);
  }
}

void fill_rows(const glm_step_batch& batch, glm_step_inputs& step) {
  step.num_rows = batch.num_rows;
  step.num_seqs = batch.num_seqs;
  step.num_samples = batch.num_samples;
  std::copy_n(batch.token_ids, batch.num_rows, step.token_ids);
  std::copy_n(batch.positions, batch.num_rows, step.positions);
  std::copy_n(batch.seq_slots, batch.num_seqs, step.seq_slots);
  std::copy_n(batch.seq_starts, batch.num_seqs + 1, step.seq_starts);
  std::copy_n(batch.sample_rows, batch.num_samples, step.sample_rows);
  for (int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    std::fill(step.row_slots + batch.seq_starts[seq], step.row_slots + batch.seq_starts[seq + 1], batch.seq_slots[seq]);
  }
  for (int32_t i = 0; i < batch.num_samples; ++i) step.sample_slots[i] = step.row_slots[batch.sample_rows[i]];
  fill_choices(batch.forced_tokens, batch.num_samples, step.forced_tokens);
  fill_choices(batch.sample_masks, batch.num_samples, step.sample_masks);
}

}  // namespace

glm_step_result Staging::result(uint64_t device_ns) const {
  const glm_step_inputs& step = block.step;
  return {.num_samples = num_samples,
          .token_ids = step.out_token_ids,
          .logprobs = step.out_logprobs,
          .top_ids = step.out_top_ids,
          .top_logprobs = step.out_top_logprobs,
          .device_ns = device_ns};
}

void pad_decode(int32_t first, int32_t end, const Limits& limits, glm_step_inputs& step) {
  for (int32_t row = first; row < end; ++row) {
    step.token_ids[row] = 0;
    step.positions[row] = 0;
    step.row_slots[row] = step.seq_slots[row] = step.sample_slots[row] = limits.max_slots;
    step.sample_rows[row] = row;
    step.sample_masks[row] = step.forced_tokens[row] = -1;
    step.seq_starts[row] = row;
  }
  step.seq_starts[end] = end;
  step.num_rows = step.num_seqs = step.num_samples = end;
}

void fill_staging(const glm_step_batch& batch, const SlotMirror& mirror, int32_t padded_rows, const Limits& limits,
                  Staging& staging) {
  fill_rows(batch, staging.block.step);
  staging.plan = batch.plan;
  staging.num_samples = batch.num_samples;
  staging.num_masks = batch.num_masks;
  if (padded_rows > batch.num_rows) pad_decode(batch.num_rows, padded_rows, limits, staging.block.step);
  // The device applies updates in any order: where two are for one entry, both bring what the last one says.
  staging.num_page_updates = batch.num_page_updates;
  std::copy_n(batch.page_updates, batch.num_page_updates, staging.block.page_updates);
  for (int32_t i = 0; i < batch.num_page_updates; ++i) {
    glm_page_update& update = staging.block.page_updates[i];
    update.page = mirror.page(update.slot, update.index);
  }
}

}  // namespace glm
