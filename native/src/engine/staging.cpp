#include "engine/staging.h"

#include <algorithm>

#include "memory/state.h"

namespace glm {
namespace {

// Layout of glm_slots.counts.
constexpr uint16_t kInPrompt = 0x8000;
constexpr uint16_t kTimesSampled = 0x7fff;

}  // namespace

Staging make_staging(const Limits& limits, Arena& arena) {
  Staging staging{.inputs = make_step_inputs(limits, arena, "staged step"), .page_updates = {}};
  staging.page_updates.reserve(static_cast<size_t>(limits.max_slots) * static_cast<size_t>(limits.max_pages()));
  return staging;
}

void fill_staging(const glm_step_batch& batch, Staging& staging) {
  glm_step_inputs& inputs = staging.inputs;
  inputs.num_rows = batch.num_rows;
  inputs.num_seqs = batch.num_seqs;
  inputs.num_samples = batch.num_samples;
  std::copy_n(batch.token_ids, batch.num_rows, inputs.token_ids);
  std::copy_n(batch.positions, batch.num_rows, inputs.positions);
  std::copy_n(batch.seq_slots, batch.num_seqs, inputs.seq_slots);
  std::copy_n(batch.seq_starts, batch.num_seqs + 1, inputs.seq_starts);
  std::copy_n(batch.sample_rows, batch.num_samples, inputs.sample_rows);
  for (int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    std::fill(inputs.row_slots + batch.seq_starts[seq], inputs.row_slots + batch.seq_starts[seq + 1],
              batch.seq_slots[seq]);
  }
  for (int32_t i = 0; i < batch.num_samples; ++i) inputs.sample_slots[i] = inputs.row_slots[batch.sample_rows[i]];
  staging.page_updates.assign(batch.page_updates, batch.page_updates + batch.num_page_updates);
}

void copy_inputs(const glm_step_inputs& from, glm_step_inputs& to) {
  to.num_rows = from.num_rows;
  to.num_seqs = from.num_seqs;
  to.num_samples = from.num_samples;
  std::copy_n(from.token_ids, from.num_rows, to.token_ids);
  std::copy_n(from.positions, from.num_rows, to.positions);
  std::copy_n(from.row_slots, from.num_rows, to.row_slots);
  std::copy_n(from.seq_slots, from.num_seqs, to.seq_slots);
  std::copy_n(from.seq_starts, from.num_seqs + 1, to.seq_starts);
  std::copy_n(from.sample_rows, from.num_samples, to.sample_rows);
  std::copy_n(from.sample_slots, from.num_samples, to.sample_slots);
}

void copy_outputs(const glm_step_inputs& from, glm_step_inputs& to) {
  const int32_t count = from.num_samples;
  std::copy_n(from.out_token_ids, count, to.out_token_ids);
  std::copy_n(from.out_logprobs, count, to.out_logprobs);
  std::copy_n(from.out_top_ids, count * GLM_MAX_LOGPROBS, to.out_top_ids);
  std::copy_n(from.out_top_logprobs, count * GLM_MAX_LOGPROBS, to.out_top_logprobs);
}

void apply_page_updates(const std::vector<glm_page_update>& updates, const glm_slots& slots) {
  for (const glm_page_update& update : updates) {
    slots.page_table[int64_t{update.slot} * slots.max_pages + update.index] = update.page;
  }
}

void apply_binding(const SlotBinding& binding, const glm_slots& slots) {
  slots.sampling[binding.slot] = binding.sampling;
  slots.last_token[binding.slot] = 0;  // a valid id, though no row may ask for it before a step has sampled
  uint16_t* counts = slots.counts + int64_t{binding.slot} * slots.vocab;
  std::fill_n(counts, slots.vocab, uint16_t{0});
  for (const int32_t token : binding.prompt) counts[token] |= kInPrompt;
  for (const int32_t token : binding.sampled) {
    if ((counts[token] & kTimesSampled) != kTimesSampled) ++counts[token];
  }
}

}  // namespace glm
