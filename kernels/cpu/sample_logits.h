/* What is computed from the logits before a token is drawn: the request's changes to them, and the model's
 * log-probabilities. */
#ifndef GLM_CPU_SAMPLE_LOGITS_H
#define GLM_CPU_SAMPLE_LOGITS_H

#include "sample_block.h"

GLM_CPU_BEGIN

/* A part of one sample's vocabulary. */
struct LogitSpan {
  float* logits;
  const uint16_t* counts;
  int32_t first;  /* id of logits[0] */
  int32_t column; /* of logits[0] in its row */
  int32_t size;
};

inline bool has_penalty(const glm_sampling& request) {
  return request.repetition_penalty != 1.0f || request.frequency_penalty != 0.0f || request.presence_penalty != 0.0f;
}

/* Bits of counts as glm_slots states them. */
inline void apply_penalties(const glm_sampling& request, const LogitSpan& span) {
  const float repetition = request.repetition_penalty;
  for (int32_t i = 0; i < span.size; ++i) {
    const uint32_t count = span.counts[i];
    const auto times = static_cast<int32_t>(count & 0x7fffu);
    const float logit = span.logits[i];
    const float repeated = logit > 0.0f ? logit / repetition : logit * repetition;
    float changed = count != 0 ? repeated : logit;
    changed -= request.frequency_penalty * static_cast<float>(times);
    changed -= times != 0 ? request.presence_penalty : 0.0f;
    span.logits[i] = changed;
  }
}

/* Step 1 of glm_sample_args; `sampled` tokens came before. */
inline void change_logits(const glm_sampling& request, int32_t sampled, const LogitSpan& span) {
  if (has_penalty(request)) apply_penalties(request, span);
  for (int32_t i = 0; i < request.num_bias; ++i) {
    const int32_t at = request.bias_ids[i] - span.first;
    if (at >= 0 && at < span.size) span.logits[at] += request.bias_values[i];
  }
  if (sampled >= request.min_tokens) return;
  for (int32_t i = 0; i < request.num_stop_ids; ++i) {
    const int32_t at = request.stop_ids[i] - span.first;
    if (at >= 0 && at < span.size) span.logits[at] = kNever;
  }
}

/* Tokens that `mask`, of the whole vocabulary, does not have become -inf. Most words of a mask are all or nothing. */
inline void apply_mask(const uint32_t* mask, const LogitSpan& span) {
  for (int32_t i = 0; i < span.size;) {
    const int32_t id = span.first + i;
    const int32_t n = std::min(32 - id % 32, span.size - i);
    const uint32_t bits = mask[id / 32] >> (id % 32);
    if (bits == 0) {
      std::fill_n(span.logits + i, n, kNever);
    } else if (bits != ~0u) {
      for (int32_t j = 0; j < n; ++j) span.logits[i + j] = (bits >> j & 1) != 0 ? span.logits[i + j] : kNever;
    }
    i += n;
  }
}

/* NaN becomes -inf, so that every later comparison is an order. */
inline void apply_temperature(float temperature, const LogitSpan& span) {
  for (int32_t i = 0; i < span.size; ++i) {
    const float scaled = span.logits[i] / temperature;
    span.logits[i] = scaled == scaled ? scaled : kNever;
  }
}

/* The best tokens seen so far, best first. */
struct TopList {
  int32_t size = 0;
  Choice best[GLM_MAX_LOGPROBS];

  void insert(Choice choice, int32_t capacity) {
    if (size == capacity && !better(choice, best[size - 1])) return;
    int32_t at = size < capacity ? size++ : capacity - 1;
    for (; at > 0 && better(choice, best[at - 1]); --at) best[at] = best[at - 1];
    best[at] = choice;
  }
};

/* Softmax denominator relative to `max`, and the `capacity` best tokens, of the model's own logits. */
struct RawStats {
  float max = kNever;
  double sum = 0.0;
  TopList top;
};

/* What two parts of a vocabulary have together; `other` has the higher ids. */
inline void add_stats(const RawStats& other, int32_t capacity, RawStats* stats) {
  const float max = other.max > stats->max ? other.max : stats->max;
  stats->sum = stats->sum * exp_below(stats->max, max) + other.sum * exp_below(other.max, max);
  stats->max = max;
  for (int32_t i = 0; i < other.top.size; ++i) stats->top.insert(other.top.best[i], capacity);
}

inline void add_to_top(const float* block, int32_t n, int32_t first, float max, int32_t capacity, TopList* top) {
  if (capacity == 0 || (top->size == capacity && !(max > top->best[capacity - 1].value))) return;
  for (int32_t i = 0; i < n; ++i) {
    top->insert({block[i] == block[i] ? block[i] : kNever, first + i}, capacity);
  }
}

inline RawStats raw_stats(const LogitSpan& span, int32_t capacity) {
  RawStats stats;
  float room[kBlock];
  float weights[kBlock];
  for (int32_t i = 0; i < span.size; i += kBlock) {
    const int32_t n = std::min(kBlock, span.size - i);
    const float* block = whole_block(span.logits + i, n, room);
    const float max = block_max(block);
    stats.max = max > stats.max ? max : stats.max;
    add_to_top(block, n, span.first + i, max, capacity, &stats.top);
  }
  for (int32_t i = 0; i < span.size; i += kBlock) {
    const float* block = whole_block(span.logits + i, std::min(kBlock, span.size - i), room);
    stats.sum += block_exp(block, stats.max, weights);
  }
  return stats;
}

GLM_CPU_END

#endif
