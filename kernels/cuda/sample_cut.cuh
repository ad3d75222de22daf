/* The n best tokens of all ranks, as the rank of the last of them: found by histograms, which ranks add up, then exactly among
 * the few of one bin, which they bring together, without sorting. By the first block of a cluster. */
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
  float sums[kSampleWarps];
  uint64_t words[1][kMaxPeers];
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
template <typename AnyLane>
__device__ inline bool narrow(const SampleRow& row, uint32_t wanted, KeyRange& range, CutShared& shared,
                              AnyLane& lane) {
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
  uint32_t own = shared.counts[bin];
  if (!lane.alone()) {
    uint32_t all = 0;
    lane.each(own, [&](uint64_t theirs) { all += static_cast<uint32_t>(theirs); });
    shared.counts[bin] = own = all;
  }
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

/* By all threads. There is room for kMaxListed ranks. */
__device__ inline void empty_list(CutShared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
}

__device__ inline void list(uint64_t rank, CutShared& shared) {
  const uint32_t at = atomicAdd(&shared.num_listed, 1u);
  if (at < kMaxListed) shared.listed[at] = rank;
}

/* The list of all ranks instead of this one's. */
template <typename AnyLane>
__device__ inline void join_lists(CutShared& shared, AnyLane& lane) {
  const uint64_t own = threadIdx.x < shared.num_listed ? shared.listed[threadIdx.x] : 0;
  empty_list(shared);
  lane.each(own, [&](uint64_t theirs) {
    if (theirs != 0) list(theirs, shared);
  });
  __syncthreads();
}

template <typename AnyLane>
__device__ inline uint64_t among_listed(const SampleRow& row, uint32_t wanted, const KeyRange& range, CutShared& shared,
                                        AnyLane& lane) {
  empty_list(shared);
  for_each_token(row, [&](float value, int32_t id) {
    const uint32_t key = value_key(value);
    if (key >= range.lowest && key <= range.highest) list(rank_of(value, static_cast<uint32_t>(id)), shared);
  });
  __syncthreads();
  if (!lane.alone()) join_lists(shared, lane);
  const uint32_t listed = min(shared.num_listed, static_cast<uint32_t>(kMaxListed));
  if (threadIdx.x < listed) {
    const uint64_t rank = shared.listed[threadIdx.x];
    uint32_t better = range.before;
    for (uint32_t i = 0; i < listed; ++i) better += shared.listed[i] > rank ? 1 : 0;
    if (better + 1 == wanted) shared.cut = rank;
  }
  __syncthreads();
  return shared.cut;
}

/* Tokens of this value on ranks whose ids are lower than this rank's. */
template <typename AnyLane>
__device__ inline uint32_t equals_below(const SampleRow& row, float value, CutShared& shared, AnyLane& lane) {
  float own = 0.0f; /* whole numbers, which f32 holds exactly */
  for_each_token(row, [&](float other, int32_t) { own += other == value ? 1.0f : 0.0f; });
  lane.gather({static_cast<uint64_t>(block_sum(own, shared.sums))}, shared.words);
  uint32_t below = 0;
  for (int peer = 0; peer < lane.rank(); ++peer) below += static_cast<uint32_t>(shared.words[0][peer]);
  return below;
}

/* More tokens than can be listed have the same value: they are taken by id. */
template <typename AnyLane>
__device__ inline uint64_t among_equals(const SampleRow& row, uint32_t wanted, const KeyRange& range, CutShared& shared,
                                        AnyLane& lane) {
  const float value = value_of_key(range.lowest);
  uint32_t before = range.before;
  if (!lane.alone()) before += equals_below(row, value, shared, lane);
  if (threadIdx.x == 0) shared.cut = 0;
  __syncthreads();
  for (int32_t first = row.begin; first < row.end; first += kSampleThreads) {
    const int32_t id = first + static_cast<int32_t>(threadIdx.x);
    const bool equal = id < row.end && row.logits[id] == value;
    const uint2 counts = count_flags(equal, shared.prefix);
    if (equal && before + counts.x + 1 == wanted) shared.cut = rank_of(value, static_cast<uint32_t>(id));
    before += counts.y;
    if (before >= wanted) break;
  }
  __syncthreads();
  if (lane.alone()) return shared.cut;
  lane.gather({shared.cut}, shared.words);
  uint64_t found = 0; /* by one rank */
  for (int peer = 0; peer < lane.num_ranks(); ++peer) found = max(found, shared.words[0][peer]);
  return found;
}

/* Rank of the `wanted`-th best token; 0 if fewer have a probability. By one block, over the row it is given and, through the
 * lane, those of the other ranks (NoLane: none). `max` is the largest value of them all. */
template <typename AnyLane>
__device__ inline uint64_t rank_of_nth(const SampleRow& row, uint32_t wanted, float max, CutShared& shared,
                                       AnyLane& lane) {
  KeyRange range{value_key(kNever) + 1, value_key(max), 0, 0};
  do {
    if (!narrow(row, wanted, range, shared, lane)) return 0;
  } while (range.count > kMaxListed && range.lowest < range.highest);
  return range.count <= kMaxListed ? among_listed(row, wanted, range, shared, lane)
                                   : among_equals(row, wanted, range, shared, lane);
}

}  // namespace glm::cuda

#endif
