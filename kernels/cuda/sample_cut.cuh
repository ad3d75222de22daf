/* The n best tokens, as the rank of the last of them: found by histograms, then exactly among the few of one bin, without sorting. */
#ifndef GLM_CUDA_SAMPLE_CUT_CUH
#define GLM_CUDA_SAMPLE_CUT_CUH

#include "sample_row.cuh"

namespace glm::cuda {

constexpr int kBins = kSampleThreads; /* a thread each */
constexpr int kMaxListed = kSampleThreads;

struct CutShared {
  uint32_t counts[kBins];
  uint64_t listed[kMaxListed];
  uint32_t prefix[kSampleWarps];
  uint32_t num_listed;
  int crossing;
  uint32_t before;
  uint64_t cut;
};

/* Keys [lowest, highest] that hold the last wanted token; `before` tokens are better than all of them. */
struct KeyRange {
  uint32_t lowest;
  uint32_t highest;
  uint32_t before;
  uint32_t count;
};

/* How many threads before this one have the flag, and how many in all. */
__device__ inline uint2 count_flags(bool flag, uint32_t* prefix) {
  const unsigned votes = __ballot_sync(0xffffffffu, flag);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();
  if (threadIdx.x % kWarp == 0) prefix[warp] = __popc(votes);
  __syncthreads();
  uint2 result = make_uint2(__popc(votes & ((1u << threadIdx.x % kWarp) - 1)), 0);
  for (int i = 0; i < kSampleWarps; ++i) {
    result.x += i < warp ? prefix[i] : 0;
    result.y += prefix[i];
  }
  return result;
}

/* Cuts the range into equal bins and keeps the one in which the count reaches `wanted`. False if it does not. */
__device__ inline bool narrow(const SampleRow& row, uint32_t wanted, KeyRange& range, CutShared& shared) {
  const int bin = static_cast<int>(threadIdx.x);
  __syncthreads();
  shared.counts[bin] = 0;
  if (bin == 0) shared.crossing = -1;
  __syncthreads();
  const uint32_t width = (range.highest - range.lowest) / kBins + 1;
  for_each_token(row, [&](float value, int32_t) {
    const uint32_t key = value_key(value);
    if (key >= range.lowest && key <= range.highest) atomicAdd(&shared.counts[(range.highest - key) / width], 1u);
  });
  __syncthreads();
  const uint32_t own = shared.counts[bin];
  uint32_t sum = own;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
    sum += bin % kWarp >= offset ? other : 0;
  }
  if (bin % kWarp == kWarp - 1) shared.prefix[bin / kWarp] = sum;
  __syncthreads();
  sum += range.before;
  for (int i = 0; i < bin / kWarp; ++i) sum += shared.prefix[i];
  if (sum >= wanted && sum - own < wanted) {
    shared.crossing = bin;
    shared.before = sum - own;
  }
  __syncthreads();
  if (shared.crossing < 0) return false;
  range.before = shared.before;
  range.count = shared.counts[shared.crossing];
  range.highest -= static_cast<uint32_t>(shared.crossing) * width;
  range.lowest = range.highest - range.lowest < width ? range.lowest : range.highest - width + 1;
  return true;
}

__device__ inline uint64_t among_listed(const SampleRow& row, uint32_t wanted, const KeyRange& range,
                                        CutShared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  for_each_token(row, [&](float value, int32_t id) {
    const uint32_t key = value_key(value);
    if (key >= range.lowest && key <= range.highest) {
      shared.listed[atomicAdd(&shared.num_listed, 1u)] = rank_of(value, static_cast<uint32_t>(id));
    }
  });
  __syncthreads();
  if (threadIdx.x < shared.num_listed) {
    const uint64_t rank = shared.listed[threadIdx.x];
    uint32_t better = range.before;
    for (uint32_t i = 0; i < shared.num_listed; ++i) better += shared.listed[i] > rank ? 1 : 0;
    if (better + 1 == wanted) shared.cut = rank;
  }
  __syncthreads();
  return shared.cut;
}

/* More tokens than can be listed have the same value: they are taken by id. */
__device__ inline uint64_t among_equals(const SampleRow& row, uint32_t wanted, const KeyRange& range,
                                        CutShared& shared) {
  const float value = value_of_key(range.lowest);
  uint32_t before = range.before;
  for (int32_t first = row.begin; first < row.end; first += kSampleThreads) {
    const int32_t id = first + static_cast<int32_t>(threadIdx.x);
    const bool equal = id < row.end && row.logits[id] == value;
    const uint2 counts = count_flags(equal, shared.prefix);
    if (equal && before + counts.x + 1 == wanted) shared.cut = rank_of(value, static_cast<uint32_t>(id));
    before += counts.y;
    if (before >= wanted) break;
  }
  __syncthreads();
  return shared.cut;
}

/* Rank of the `wanted`-th best token; 0 if fewer have a probability. By one block, over the row it is given. */
__device__ inline uint64_t rank_of_nth(const SampleRow& row, uint32_t wanted, float max, CutShared& shared) {
  KeyRange range{value_key(kNever) + 1, value_key(max), 0, 0};
  do {
    if (!narrow(row, wanted, range, shared)) return 0;
  } while (range.count > kMaxListed && range.lowest < range.highest);
  return range.count <= kMaxListed ? among_listed(row, wanted, range, shared)
                                   : among_equals(row, wanted, range, shared);
}

}  // namespace glm::cuda

#endif
