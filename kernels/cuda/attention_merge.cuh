/* The splits of a row, each summed by a block of one cluster, merged through its shared memory. */
#ifndef GLM_CUDA_ATTENTION_MERGE_CUH
#define GLM_CUDA_ATTENTION_MERGE_CUH

#include <cooperative_groups.h>

#include "attention_multiply.cuh"
#include "tma.cuh"

namespace glm::cuda {

/* What a block leaves to the others. */
template <int kDim>
struct SplitResult {
  float2 sums[kMmaHeads][kDim / 2];
  float2 weights[kMmaHeads]; /* maximum score, sum of exponentials */
};

template <typename Kv, int kDim>
__device__ __forceinline__ void share_split(const Accumulator<kDim>& acc, int heads, SplitResult<kDim>& result) {
  for_each_pair<Kv, kDim>(acc, heads, [&](int head, int column, float2 sums, int half) {
    result.sums[head][column / 2] = sums;
    if (column == 0) result.weights[head] = make_float2(acc.states[half].max, acc.states[half].sum);
  });
}

/* By every block of the cluster that has a split: each merges a part of the columns, in the order of splits. */
template <int kDim>
__device__ __forceinline__ void merge_cluster(SplitResult<kDim>& own, int split, int splits, int heads, bf16* out) {
  constexpr int kPairs = kDim / 2;
  cluster_sync();
  const auto cluster = cooperative_groups::this_cluster();
  for (int i = split * kAttentionThreads + static_cast<int>(threadIdx.x); i < heads * kPairs;
       i += splits * kAttentionThreads) {
    float2 weights[kClusterSplits];
    float2 sums[kClusterSplits];
#pragma unroll
    for (int other = 0; other < kClusterSplits; ++other) {
      if (other >= splits) break;
      const SplitResult<kDim>* from = cluster.map_shared_rank(&own, other);
      weights[other] = from->weights[i / kPairs];
      sums[other] = from->sums[i / kPairs][i % kPairs];
    }
    SoftmaxState state;
    float2 total = {};
#pragma unroll
    for (int other = 0; other < kClusterSplits; ++other) {
      if (other >= splits) break;
      const MergeFactors factors = merge(state, weights[other].x, weights[other].y);
      total.x = merged(total.x, sums[other].x, factors);
      total.y = merged(total.y, sums[other].y, factors);
    }
    out[2 * i] = from_float<bf16>(normalized(total.x, state.sum));
    out[2 * i + 1] = from_float<bf16>(normalized(total.y, state.sum));
  }
  cluster_leave_together();
}

}  // namespace glm::cuda

#endif
