/* The model's own log-probabilities: the softmax normaliser and the best tokens of a row. */
#ifndef GLM_CUDA_SAMPLE_LOGPROBS_CUH
#define GLM_CUDA_SAMPLE_LOGPROBS_CUH

#include "glm/kernels.h"
#include "sample_cut.cuh"

namespace glm::cuda {

/* Shared. */
struct RawStats {
  double normalizer; /* log of the sum of exp(logit) */
  int32_t ids[GLM_MAX_LOGPROBS];
  float values[GLM_MAX_LOGPROBS];
};

__device__ inline double log_normalizer(const SampleRow& row, float max, float* sums) {
  float own = 0.0f;
  for_each_token(row, [&](float value, int32_t) { own += expf(value - max); });
  return static_cast<double>(max) + log(static_cast<double>(block_sum(own, sums)));
}

/* Tokens that have no probability follow those that have, by id; then come entries without a token. */
__device__ inline void fill_up(const SampleRow& row, int32_t found, int32_t wanted, RawStats& stats) {
  for (int32_t id = row.begin; id < row.end && found < wanted; ++id) {
    if (row.logits[id] > kNever) continue;
    stats.ids[found] = id;
    stats.values[found++] = kNever;
  }
  for (; found < wanted; ++found) {
    stats.ids[found] = -1;
    stats.values[found] = kNever;
  }
}

/* The `wanted` best tokens, best first. */
__device__ inline void find_top(const SampleRow& row, float max, int32_t wanted, CutShared& shared, RawStats& stats) {
  const uint64_t cut = rank_of_nth(row, static_cast<uint32_t>(wanted), max, shared);
  __syncthreads();
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  for_each_token(row, [&](float value, int32_t id) {
    const uint64_t rank = rank_of(value, id);
    if (value > kNever && rank >= cut) shared.listed[atomicAdd(&shared.num_listed, 1u)] = rank;
  });
  __syncthreads();
  const auto found = static_cast<int32_t>(shared.num_listed);
  if (static_cast<int32_t>(threadIdx.x) < found) {
    const uint64_t rank = shared.listed[threadIdx.x];
    int32_t place = 0;
    for (int32_t i = 0; i < found; ++i) place += shared.listed[i] > rank ? 1 : 0;
    stats.ids[place] = static_cast<int32_t>(id_of(rank));
    stats.values[place] = value_of(rank);
  }
  if (threadIdx.x == 0 && found < wanted) fill_up(row, found, wanted, stats);
  __syncthreads();
}

}  // namespace glm::cuda

#endif
