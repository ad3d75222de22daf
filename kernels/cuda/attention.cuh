/* What every attention kernel shares: how keys are split, and how the splits of a row are merged.
 *
 * A row with L keys is cut into splits whose size depends on L alone. A split is summed by online softmax in tiles of 64 keys
 * (attention_softmax.cuh), and splits are merged in order of position. Which kernel runs a row, and whether one block walks all of
 * its splits or each has its own, changes no bit. */
#ifndef GLM_CUDA_ATTENTION_CUH
#define GLM_CUDA_ATTENTION_CUH

#include <cuda.h>

#include "device.h"
#include "kernel.cuh"
#include "kv_cache.cuh"

namespace glm::cuda {

constexpr int kTileKeys = 64;
constexpr int kPagesPerTile = kTileKeys / GLM_PAGE_SIZE;
constexpr int kMaxSplits = 32;
constexpr int kMinSplitKeys = 512;
constexpr int kMapRowBytes = 128;
constexpr int kClusterSplits = 8; /* of a row, that the blocks of a cluster merge by themselves */
constexpr int kMmaHeads = 16;     /* query rows of one mma tile */

__host__ __device__ __forceinline__ int split_keys(int keys) {
  const int even = (keys + kMaxSplits * kTileKeys - 1) / (kMaxSplits * kTileKeys) * kTileKeys;
  return even > kMinSplitKeys ? even : kMinSplitKeys;
}

__host__ __device__ __forceinline__ int num_splits(int keys) {
  const int size = split_keys(keys);
  return (keys + size - 1) / size;
}

/* Which rows a launch computes. */
enum class RowChoice : int32_t {
  kAll,
  kAlone /* the rows of sequences that have one row in this step; unit i is sequence i */
};

struct AttentionParams {
  CUtensorMap k_map; /* prefill's: K, a token a row */
  CUtensorMap v_map;
  glm_step_inputs step;
  KvPages pages;
  glm_tensor q;
  glm_kv_layer kv;
  glm_tensor out;
  int32_t heads;
  int32_t group;       /* query heads of a KV head */
  float softmax_scale; /* of the scores; times log2(e) where exponents are taken to base 2 */
  RowChoice choice;
  bool settled;          /* all but the rows' queries, keys and values was there before the launch (settled_launches) */
  int32_t units;         /* rows, or sequences */
  int32_t merged_splits; /* blocks of a cluster; it merges up to so many splits of a row. 1: no clusters */
  int32_t max_splits;    /* of the longest sequence that the page table can hold */
  float* partial_sums;   /* of rows that are merged later: [units][heads][max_splits][head_dim] */
  float2* partial_weights; /* [units][heads][max_splits]: maximum score, sum of exponentials */
};

/* Tiles of the query heads of a KV head. */
__host__ __device__ __forceinline__ int head_tiles(const AttentionParams& p) {
  return (p.group + kMmaHeads - 1) / kMmaHeads;
}

/* The row of a unit, or -1: it is another launch's. */
__device__ __forceinline__ int row_of_unit(const AttentionParams& p, int unit) {
  if (p.choice == RowChoice::kAll) return unit;
  const int row = p.step.seq_starts[unit];
  return p.step.seq_starts[unit + 1] - row == 1 ? row : -1;
}

/* 2^x; 0 for -inf. */
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Softmax sums so far of one row: the largest score (log2), the sum of 2^(score - max). */
struct SoftmaxState {
  float max = -INFINITY;
  float sum = 0.0f;
};

/* Factors of what was summed before and of what is added. */
struct MergeFactors {
  float before;
  float added;
};

__device__ __forceinline__ MergeFactors merge(SoftmaxState& state, float max, float sum) {
  const float largest = fmaxf(state.max, max);
  const MergeFactors factors{exp2_approx(state.max - largest), exp2_approx(max - largest)};
  state.max = largest;
  state.sum = fmaf(state.sum, factors.before, sum * factors.added);
  return factors;
}

__device__ __forceinline__ float merged(float before, float added, const MergeFactors& factors) {
  return fmaf(before, factors.before, added * factors.added);
}

/* In f32 throughout, for every dtype and head size. */
glm_status attention_scalar(glm_device* device, const AttentionParams& params, int rows);

/* On tensor cores: bf16 activations, bf16 or FP8 keys, head sizes 64 and 128. `split`: partial sums go to the workspace, one block a
 * split; otherwise one block walks all splits of a row. */
glm_status attention_mma(glm_device* device, const AttentionParams& params, bool split);

/* Every sequence with two or more rows in this step, by wgmma (sm_90a): bf16 throughout, head sizes 64 and 128. */
glm_status attention_prefill(glm_device* device, const AttentionParams& params);

}  // namespace glm::cuda

#endif
