/* One sample's vocabulary, swept by a cluster of two blocks: order of tokens, sweeps, and reductions that do not depend on
 * scheduling. Where ranks have other parts of the vocabulary, the cluster's first block exchanges words with theirs. */
#ifndef GLM_CUDA_SAMPLE_ROW_CUH
#define GLM_CUDA_SAMPLE_ROW_CUH

#include <cooperative_groups.h>

#include "kernel.cuh"
#include "peers.cuh"

namespace glm::cuda {

constexpr int kSampleThreads = 1024;
constexpr int kSampleBlocks = 2; /* of a cluster, which shares a sample */
constexpr int kSampleWarps = kSampleThreads / kWarp;
constexpr float kNever = -INFINITY;
constexpr uint32_t kLastId = 0xffffffffu;

/* Larger values have larger keys; 0 and -0 have the same. Not for NaN. */
__device__ __forceinline__ uint32_t value_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of_key(uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}

/* A token's rank as one number, larger is better: by value, then by lower id. 0 is no token. */
__device__ __forceinline__ uint64_t rank_of(float value, uint32_t id) {
  return static_cast<uint64_t>(value_key(value)) << 32 | (kLastId - id);
}

__device__ __forceinline__ uint32_t id_of(uint64_t rank) {
  return kLastId - static_cast<uint32_t>(rank);
}

__device__ __forceinline__ float value_of(uint64_t rank) {
  return value_of_key(static_cast<uint32_t>(rank >> 32));
}

/* The ids [begin, end) of a sample; begin is a multiple of 4. */
struct SampleRow {
  float* logits;
  int32_t begin;
  int32_t end;
  bool aligned; /* logits: to 16 bytes */
};

/* One block's share of a row. */
__device__ __forceinline__ SampleRow share_of(const SampleRow& row, int rank) {
  const int32_t share = (row.end - row.begin + kSampleBlocks * 4 - 1) / (kSampleBlocks * 4) * 4;
  const int32_t begin = row.begin + rank * share;
  return {row.logits, min(begin, row.end), min(begin + share, row.end), row.aligned};
}

/* values[4] of the ids [first, first + 4); past the end and for NaN: -inf. */
__device__ __forceinline__ void load_four(const SampleRow& row, int32_t first, float values[4]) {
  if (row.aligned && first + 4 <= row.end) {
    const float4 four = *reinterpret_cast<const float4*>(row.logits + first);
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = first + i < row.end ? row.logits[first + i] : kNever;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = isnan(values[i]) ? kNever : values[i];
}

__device__ __forceinline__ void store_four(const SampleRow& row, int32_t first, const float values[4]) {
  if (row.aligned && first + 4 <= row.end) {
    *reinterpret_cast<float4*>(row.logits + first) = make_float4(values[0], values[1], values[2], values[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i < row.end) row.logits[first + i] = values[i];
  }
}

/* f(first id, values[4]) for every group of four ids of this thread. */
template <typename F>
__device__ __forceinline__ void for_each_four(const SampleRow& row, F&& f) {
#pragma unroll 4
  for (int32_t first = row.begin + static_cast<int32_t>(threadIdx.x) * 4; first < row.end;
       first += kSampleThreads * 4) {
    float values[4];
    load_four(row, first, values);
    f(first, values);
  }
}

/* f(value, id) for every token of this thread. */
template <typename F>
__device__ __forceinline__ void for_each_token(const SampleRow& row, F&& f) {
  for_each_four(row, [&](int32_t first, const float values[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < row.end) f(values[i], first + i);
    }
  });
}

constexpr int kMostWords = 2; /* that a rank tells the others at once */

/* One number of each block of a cluster, and what ranks tell each other. */
struct ClusterShared {
  uint64_t warps[kSampleWarps];
  float sums[kSampleWarps];
  uint64_t rank;
  float2 sum;
  uint64_t words[kMostWords][kMaxPeers];
  uint64_t agreed[kMostWords];
  int lost; /* a rank did not answer */
};

__device__ __forceinline__ uint64_t block_max_rank(uint64_t rank, uint64_t* shared) {
  const auto better = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
  const auto warp_best = [&](uint64_t x) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) x = better(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
  };
  rank = warp_best(rank);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = rank;
  __syncthreads();
  return warp_best(shared[threadIdx.x % kWarp]);
}

/* merge(words of all ranks, result) by one thread, from the words that are the same in all threads of a rank's cluster; they get the
 * result. */
template <int N, typename Merge, typename AnyLane>
__device__ void merge_ranks(uint64_t (&words)[N], AnyLane& lane, ClusterShared& shared, Merge&& merge) {
  if (lane.alone()) return;
  auto cluster = cooperative_groups::this_cluster();
  if (cluster.block_rank() == 0) {
    lane.gather(words, shared.words);
    if (lane.lost()) shared.lost = 1;
    if (threadIdx.x == 0) merge(shared.words, shared.agreed);
  }
  cluster.sync();
  const uint64_t* agreed = cluster.map_shared_rank(shared.agreed, 0);
#pragma unroll
  for (int i = 0; i < N; ++i) words[i] = agreed[i];
  cluster.sync();
}

/* The largest first word of a rank, and that rank's other words. */
template <int N, typename AnyLane>
__device__ void largest_of_ranks(uint64_t (&words)[N], AnyLane& lane, ClusterShared& shared) {
  merge_ranks(words, lane, shared, [&](const uint64_t (*all)[kMaxPeers], uint64_t* agreed) {
    int best = 0;
    for (int peer = 1; peer < lane.num_ranks(); ++peer) best = all[0][peer] > all[0][best] ? peer : best;
    for (int i = 0; i < N; ++i) agreed[i] = all[i][best];
  });
}

/* Whether an exchange so far has failed, the same in all threads of the cluster: then its loops end. */
template <typename AnyLane>
__device__ __forceinline__ bool is_lost(const AnyLane& lane, const ClusterShared& shared) {
  if (lane.alone()) return false;
  auto cluster = cooperative_groups::this_cluster();
  const bool lost = *cluster.map_shared_rank(&shared.lost, 0) != 0;
  cluster.sync();
  return lost;
}

__device__ __forceinline__ uint64_t cluster_max_rank(uint64_t rank, ClusterShared& shared) {
  auto cluster = cooperative_groups::this_cluster();
  rank = block_max_rank(rank, shared.warps);
  if (threadIdx.x == 0) shared.rank = rank;
  cluster.sync();
  uint64_t best = 0;
  for (int i = 0; i < kSampleBlocks; ++i) best = max(best, *cluster.map_shared_rank(&shared.rank, i));
  cluster.sync();
  return best;
}

/* Two sums at once, each in a fixed order. */
__device__ __forceinline__ float2 cluster_sum(float2 own, ClusterShared& shared) {
  auto cluster = cooperative_groups::this_cluster();
  const float2 block = make_float2(block_sum(own.x, shared.sums), block_sum(own.y, shared.sums));
  if (threadIdx.x == 0) shared.sum = block;
  cluster.sync();
  float2 total = make_float2(0.0f, 0.0f);
  for (int i = 0; i < kSampleBlocks; ++i) {
    const float2 part = *cluster.map_shared_rank(&shared.sum, i);
    total = make_float2(total.x + part.x, total.y + part.y);
  }
  cluster.sync();
  return total;
}

/* Over all ranks, in their order. */
template <typename AnyLane>
__device__ __forceinline__ float2 sum_of_ranks(float2 own, AnyLane& lane, ClusterShared& shared) {
  uint64_t words[1] = {static_cast<uint64_t>(__float_as_uint(own.y)) << 32 | __float_as_uint(own.x)};
  merge_ranks(words, lane, shared, [&](const uint64_t (*all)[kMaxPeers], uint64_t* agreed) {
    float2 total = make_float2(0.0f, 0.0f);
    for (int peer = 0; peer < lane.num_ranks(); ++peer) {
      total.x += __uint_as_float(static_cast<uint32_t>(all[0][peer]));
      total.y += __uint_as_float(static_cast<uint32_t>(all[0][peer] >> 32));
    }
    agreed[0] = static_cast<uint64_t>(__float_as_uint(total.y)) << 32 | __float_as_uint(total.x);
  });
  return make_float2(__uint_as_float(static_cast<uint32_t>(words[0])),
                     __uint_as_float(static_cast<uint32_t>(words[0] >> 32)));
}

}  // namespace glm::cuda

#endif
