/* The draw: the kept token with the largest value + Gumbel noise.
 *
 * top-p keeps a prefix of the tokens in order of rank. Instead of finding its end, the best noisy token of all is drawn and kept if the
 * tokens before it weigh less than top_p; if not, the prefix ends before it, and the draw is repeated among the better tokens. The
 * accepted token is the best noisy one of the prefix, exactly. A draw is accepted with probability top_p. */
#ifndef GLM_CUDA_SAMPLE_DRAW_CUH
#define GLM_CUDA_SAMPLE_DRAW_CUH

#include "philox.cuh"
#include "sample_row.cuh"

namespace glm::cuda {

/* Only tokens of a higher rank than (value, id) take part. */
struct Bound {
  float value;
  uint32_t id;
};

__device__ __forceinline__ bool is_above(float value, uint32_t id, const Bound& bound) {
  return value > bound.value || (value == bound.value && id < bound.id);
}

/* e^x within a few ulp. */
__device__ __forceinline__ float exp_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896340736f));
  return y;
}

/* Can value + gumbel(word) exceed `best`? May say yes wrongly, never no. With u = 1 - t, gumbel > best - value means
 * -log(u) < e^(value - best), and -log(u) >= t. */
__device__ __forceinline__ bool may_win(float value, uint32_t word, float best) {
  const float t = (8388607.5f - static_cast<float>(word >> 9)) * 0x1p-23f;
  return t < exp_approx(value - best) * 1.001f + 1e-37f;
}

/* The best noisy rank above the bound, over the block's share. The id in it is the token's; the value is noisy. */
__device__ inline uint64_t draw_noisy(const SampleRow& row, uint64_t seed, uint32_t position, const Bound& bound) {
  const uint2 key = make_uint2(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  const int32_t lane_first = static_cast<int32_t>(threadIdx.x) * 4;
  uint64_t best = 0;
  uint32_t best_key = value_key(kNever); /* of the warp */
  for (int32_t base = row.begin; base < row.end; base += kSampleThreads * 4) {
    const int32_t first = base + lane_first;
    float values[4];
    load_four(row, first, values);
    bool possible = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!is_above(values[i], static_cast<uint32_t>(first + i), bound)) values[i] = kNever;
      possible = possible || values[i] > kNever;
    }
    if (__any_sync(0xffffffffu, possible)) {
      const uint4 words = philox4x32_10(make_uint4(static_cast<uint32_t>(first) / 4, position, 0, 0), key);
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
      const float floor = value_of_key(best_key);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (values[i] == kNever || !may_win(values[i], word[i], floor)) continue;
        const uint64_t rank = rank_of(values[i] + gumbel(word[i]), static_cast<uint32_t>(first + i));
        best = rank > best ? rank : best;
      }
      best_key = __reduce_max_sync(0xffffffffu, max(best_key, static_cast<uint32_t>(best >> 32)));
    }
  }
  return best;
}

/* Softmax weight (relative to the best token) of the tokens above `bound`, and of all above `all`. */
__device__ inline float2 weigh(const SampleRow& row, float max, const Bound& bound, const Bound& all) {
  float2 sums = make_float2(0.0f, 0.0f);
  for_each_four(row, [&](int32_t first, const float values[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto id = static_cast<uint32_t>(first + i);
      const float weight = values[i] == max ? 1.0f : exp_approx(values[i] - max);
      sums.x += is_above(values[i], id, bound) ? weight : 0.0f;
      sums.y += is_above(values[i], id, all) ? weight : 0.0f;
    }
  });
  return sums;
}

}  // namespace glm::cuda

#endif
