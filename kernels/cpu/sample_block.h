/* The vocabulary in blocks of 256 tokens, the grain at which logits are scanned or skipped, and the order of tokens. */
#ifndef GLM_CPU_SAMPLE_BLOCK_H
#define GLM_CPU_SAMPLE_BLOCK_H

#include <algorithm>
#include <limits>

#include "float_math.h"
#include "simd.h"

GLM_CPU_BEGIN

inline constexpr int32_t kBlock = 256;
inline constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Choice {
  float value = kNever;
  int32_t id = -1;
};

/* Better first: the larger value, then the lower id. */
inline bool better(const Choice& a, const Choice& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

/* A whole block at `logits`, or its `n` tokens copied into `room` and filled up with -inf. */
inline const float* whole_block(const float* logits, int32_t n, float* room) {
  if (n == kBlock) return logits;
  for (int32_t i = 0; i < kBlock; ++i) room[i] = i < n ? logits[i] : kNever;
  return room;
}

/* NaN never wins. */
inline float block_max(const float* block) {
  F32 best[4] = {broadcast(kNever), broadcast(kNever), broadcast(kNever), broadcast(kNever)};
  for (int32_t i = 0; i < kBlock; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const F32 v = load(block + i + j * kLanes);
      best[j] = v > best[j] ? v : best[j];
    }
  }
  alignas(64) float lanes[4 * kLanes];
  for (int j = 0; j < 4; ++j) store(lanes + j * kLanes, best[j]);
  float max = lanes[0];
  for (float lane : lanes) max = lane > max ? lane : max;
  return max;
}

/* The first token of a block with this value, which must be there. */
inline int32_t find_in_block(const float* block, float value) {
  int32_t i = 0;
  while (block[i] != value) ++i;
  return i;
}

/* exp(x - max), 1 for the maximum itself even where that is infinite. */
inline float exp_below(float x, float max) {
  return x == max ? 1.0f : exp_f32(x - max);
}

/* weights[i] = exp_below(block[i], max), 0 for NaN; returns their sum. */
inline double block_exp(const float* block, float max, float* weights) {
  for (int32_t i = 0; i < kBlock; ++i) {
    const float weight = exp_below(block[i], max);
    weights[i] = weight == weight ? weight : 0.0f;
  }
  F32 total = {};
  for (int32_t i = 0; i < kBlock; i += kLanes) total += load(weights + i);
  return sum(total);
}

GLM_CPU_END

#endif
