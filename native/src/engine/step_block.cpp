#include "engine/step_block.h"

#include <initializer_list>

namespace glm {
namespace {

constexpr size_t kAlignment = 64;

// Lays arrays one after the other, first to learn their bytes (base NULL), then to place them.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}

  template <class T>
  T* array(std::initializer_list<int64_t> sizes) {
    std::byte* at = base_ == nullptr ? nullptr : base_ + bytes_;
    const size_t bytes = Arena::byte_count("a step", sizeof(T), sizes);
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(at);
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  size_t bytes_ = 0;
};

size_t place_inputs(StepBlock& block, const Limits& limits) {
  Layout layout(block.inputs);
  glm_step_inputs& step = block.step;
  for (int32_t** array : {&step.token_ids, &step.positions, &step.row_slots}) {
    *array = layout.array<int32_t>({limits.max_rows});
  }
  for (int32_t** array :
       {&step.seq_slots, &step.sample_rows, &step.sample_slots, &step.sample_masks, &step.forced_tokens}) {
    *array = layout.array<int32_t>({limits.max_samples});
  }
  step.seq_starts = layout.array<int32_t>({limits.max_samples + int64_t{1}});
  block.page_updates = layout.array<glm_page_update>({limits.max_slots, limits.max_pages()});
  return layout.bytes();
}

size_t place_results(StepBlock& block, const Limits& limits) {
  Layout layout(block.results);
  glm_step_inputs& step = block.step;
  step.out_token_ids = layout.array<int32_t>({limits.max_samples});
  step.out_logprobs = layout.array<float>({limits.max_samples});
  step.out_top_ids = layout.array<int32_t>({limits.max_samples, GLM_MAX_LOGPROBS});
  step.out_top_logprobs = layout.array<float>({limits.max_samples, GLM_MAX_LOGPROBS});
  return layout.bytes();
}

}  // namespace

StepBlock make_step_block(const Limits& limits, int32_t vocab, Arena& arena) {
  StepBlock block{};
  block.inputs = static_cast<std::byte*>(arena.allocate_bytes("inputs of a step", place_inputs(block, limits)));
  block.result_bytes = place_results(block, limits);
  block.results = static_cast<std::byte*>(arena.allocate_bytes("results of a step", block.result_bytes));
  block.mask_words = (static_cast<size_t>(vocab) + 31) / 32;
  const size_t mask_bytes = Arena::byte_count("masks of a step", block.mask_bytes(1), {limits.max_samples});
  block.step.masks = static_cast<uint32_t*>(arena.allocate_bytes("masks of a step", mask_bytes));
  place_inputs(block, limits);
  place_results(block, limits);
  return block;
}

}  // namespace glm
