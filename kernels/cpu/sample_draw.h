/* Step 3 of glm_sample_args: the kept token with the largest value + Gumbel noise. */
#ifndef GLM_CPU_SAMPLE_DRAW_H
#define GLM_CPU_SAMPLE_DRAW_H

#include "philox.h"
#include "sample_cut.h"

GLM_CPU_BEGIN

struct NoiseKey {
  uint64_t seed;
  uint32_t position;
};

/* scores[i] = block[i] + noise of token first + i, -inf for what the cut drops; `first` is a multiple of 4. */
inline void noisy_scores(const float* block, int32_t first, const NoiseKey& key, const Cut& cut, float* scores) {
  uint32_t words[kBlock];
  philox_words<kBlock / 4>(key.seed, static_cast<uint32_t>(first) / 4, key.position, words);
  for (int32_t i = 0; i < kBlock; ++i) {
    const float u = (static_cast<float>(static_cast<int32_t>(words[i] >> 9)) + 0.5f) * 0x1p-23f;
    const float score = block[i] - log_f32(-log_f32(u));
    const bool keep = (block[i] > cut.value) | ((block[i] == cut.value) & (first + i <= cut.id));
    scores[i] = keep ? score : kNever;
  }
}

/* Replaces `drawn` by the block's best noisy token if that is better. */
inline void draw_block(const float* block, int32_t first, const NoiseKey& key, const Cut& cut, Choice* drawn) {
  float scores[kBlock];
  noisy_scores(block, first, key, cut, scores);
  const float best = block_max(scores);
  if (best > drawn->value) *drawn = {best, first + find_in_block(scores, best)};
}

GLM_CPU_END

#endif
