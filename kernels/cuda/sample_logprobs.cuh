/* The model's own log-probabilities: the softmax normaliser and the best tokens of a row. */
#ifndef GLM_CUDA_SAMPLE_LOGPROBS_CUH
#define GLM_CUDA_SAMPLE_LOGPROBS_CUH

#include "glm/kernels.h"
#include "sample_cut.cuh"

namespace glm::cuda {

/* Shared. */
struct RawStats {
  double normalizer; /* log of the sum of exp(logit) over all tokens */
  int32_t ids[GLM_MAX_LOGPROBS];
  float values[GLM_MAX_LOGPROBS];
  uint64_t best[GLM_MAX_LOGPROBS]; /* ranks of this rank's tokens; 0: none */
};

/* Sum of exp(logit - max); 0 if no token is possible. */
__device__ inline float weight_of(const SampleRow& row, float max, float* sums) {
  float own = 0.0f;
  for_each_token(row, [&](float value, int32_t) { own += max == kNever ? 0.0f : expf(value - max); });
  return block_sum(own, sums);
}

/* Of all ranks, from each one's largest logit and weight. By the first block of a cluster; -inf if no token is possible. */
template <typename AnyLane>
__device__ inline double log_normalizer(float max, float weight, AnyLane& lane, uint64_t (*words)[kMaxPeers]) {
  if (lane.alone()) return static_cast<double>(max) + log(static_cast<double>(weight));
  lane.gather({static_cast<uint64_t>(__float_as_uint(max)) << 32 | __float_as_uint(weight)}, words);
  const auto max_of = [&](int peer) { return __uint_as_float(static_cast<uint32_t>(words[0][peer] >> 32)); };
  const auto weight_of = [&](int peer) { return __uint_as_float(static_cast<uint32_t>(words[0][peer])); };
  float largest = kNever;
  for (int peer = 0; peer < lane.num_ranks(); ++peer) largest = fmaxf(largest, max_of(peer));
  double sum = 0.0;
  for (int peer = 0; peer < lane.num_ranks(); ++peer) {
    if (weight_of(peer) > 0.0f) sum += weight_of(peer) * exp(static_cast<double>(max_of(peer)) - largest);
  }
  return static_cast<double>(largest) + log(sum);
}

/* Tokens that have no probability follow those that have, by id. */
__device__ inline void fill_up(const SampleRow& row, int32_t found, int32_t wanted, RawStats& stats) {
  for (int32_t id = row.begin; id < row.end && found < wanted; ++id) {
    if (!(row.logits[id] > kNever)) stats.best[found++] = rank_of(kNever, static_cast<uint32_t>(id));
  }
  for (; found < wanted; ++found) stats.best[found] = 0;
}

/* What is listed in order, best first: at most kMaxListed ranks, all different. put(place, rank) by a thread each. */
template <typename Put>
__device__ void for_each_listed(const CutShared& shared, Put&& put) {
  const uint32_t listed = min(shared.num_listed, static_cast<uint32_t>(kMaxListed));
  if (threadIdx.x >= listed) return;
  const uint64_t rank = shared.listed[threadIdx.x];
  int32_t place = 0;
  for (uint32_t i = 0; i < listed; ++i) place += shared.listed[i] > rank ? 1 : 0;
  put(place, rank);
}

/* This rank's `wanted` best tokens, best first, to stats.best. */
__device__ inline void find_own_top(const SampleRow& row, float max, int32_t wanted, CutShared& shared,
                                    RawStats& stats) {
  NoLane nobody;
  const uint64_t cut = max == kNever ? 0 : rank_of_nth(row, static_cast<uint32_t>(wanted), max, shared, nobody);
  empty_list(shared);
  for_each_token(row, [&](float value, int32_t id) {
    const uint64_t rank = rank_of(value, static_cast<uint32_t>(id));
    if (value > kNever && rank >= cut) list(rank, shared);
  });
  __syncthreads();
  for_each_listed(shared, [&](int32_t place, uint64_t rank) { stats.best[place] = rank; });
  const auto found = static_cast<int32_t>(shared.num_listed);
  if (threadIdx.x == 0 && found < wanted) fill_up(row, found, wanted, stats);
  __syncthreads();
}

/* The `wanted` best tokens of all ranks, best first; then entries without a token. */
template <typename AnyLane>
__device__ inline void find_top(const SampleRow& row, float max, int32_t wanted, CutShared& shared, RawStats& stats,
                                AnyLane& lane) {
  find_own_top(row, max, wanted, shared, stats);
  const auto at = static_cast<int32_t>(threadIdx.x);
  const uint64_t own = at < wanted ? stats.best[at] : 0;
  empty_list(shared);
  if (lane.alone()) {
    if (own != 0) list(own, shared);
  } else {
    lane.each(own, [&](uint64_t theirs) {
      if (theirs != 0) list(theirs, shared);
    });
  }
  if (at < wanted) {
    stats.ids[at] = -1;
    stats.values[at] = kNever;
  }
  __syncthreads();
  for_each_listed(shared, [&](int32_t place, uint64_t rank) {
    if (place >= wanted) return;
    stats.ids[place] = static_cast<int32_t>(id_of(rank));
    stats.values[place] = value_of(rank);
  });
  __syncthreads();
}

}  // namespace glm::cuda

#endif
