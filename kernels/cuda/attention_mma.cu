#include "attention_merge.cuh"
#include "attention_walk.cuh"
#include "launch.h"

namespace glm::cuda {

namespace {

/* A block's heads: those of tile z. */
struct HeadTile {
  int kv_head;
  int first;
  int count;
};

__device__ __forceinline__ HeadTile head_tile(const AttentionParams& p, int tile) {
  const int kv_head = tile / head_tiles(p);
  const int first_in_group = tile % head_tiles(p) * kMmaHeads;
  return {kv_head, kv_head * p.group + first_in_group, min(kMmaHeads, p.group - first_in_group)};
}

template <typename Kv, int kDim>
__device__ void store_partial(const AttentionParams& p, int64_t unit, const HeadTile& heads, int split,
                              const Accumulator<kDim>& acc) {
  const int64_t base = (unit * p.heads + heads.first) * p.max_splits + split;
  for_each_run<Kv, kDim>(acc, heads.count, [&](int head, int column, auto sums, int half) {
    const int64_t at = base + static_cast<int64_t>(head) * p.max_splits;
    *reinterpret_cast<decltype(sums)*>(p.partial_sums + at * kDim + column) = sums;
    if (column == 0) p.partial_weights[at] = make_float2(acc.states[half].max, acc.states[half].sum);
  });
}

template <typename Kv, int kDim>
__device__ void store_result(const AttentionParams& p, int64_t row, const HeadTile& heads,
                             const Accumulator<kDim>& acc) {
  bf16* out = row_of<bf16>(p.out, row) + static_cast<int64_t>(heads.first) * kDim;
  for_each_pair<Kv, kDim>(acc, heads.count, [&](int head, int column, float2 sums, int half) {
    out[head * kDim + column] = from_float<bf16>(normalized(sums.x, acc.states[half].sum));
    out[head * kDim + column + 1] = from_float<bf16>(normalized(sums.y, acc.states[half].sum));
  });
}

template <int kDim>
__device__ void merge_split(const Accumulator<kDim>& split, Accumulator<kDim>& total) {
  MergeFactors factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factors[half] = merge(total.states[half], split.states[half].max, split.states[half].sum);
  }
#pragma unroll
  for (int tile = 0; tile < Accumulator<kDim>::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total.sums[tile][i] = merged(total.sums[tile][i], split.sums[tile][i], factors[i / 2]);
  }
}

/* Where a block begins. */
struct RowPlace {
  int row;
  int unit;
  int split;
  int keys; /* of the row */
};

/* The row's result if there is but one split or a cluster has all of them; else this split's, for the merge. `raw`: shared memory. */
template <typename Kv, int kDim>
__device__ __forceinline__ void store_split(const AttentionParams& p, const RowPlace& at, const HeadTile& heads,
                                            const Accumulator<kDim>& acc, uint8_t* raw) {
  const int splits = num_splits(at.keys);
  if (splits == 1) {
    store_result<Kv, kDim>(p, at.row, heads, acc);
  } else if (splits <= p.merged_splits) {
    auto& result = *reinterpret_cast<SplitResult<kDim>*>(raw);
    static_assert(sizeof(result) <= sizeof(Slots<Kv, kDim, false>));
    __syncthreads(); /* all warps have read the last slot */
    share_split<Kv, kDim>(acc, heads.count, result);
    bf16* out = row_of<bf16>(p.out, at.row) + static_cast<int64_t>(heads.first) * kDim;
    merge_cluster<kDim>(result, at.split, splits, heads.count, out);
  } else {
    store_partial<Kv, kDim>(p, at.unit, heads, at.split, acc);
  }
}

/* Sums the block's keys, and leaves the row's result, or a split's to its merge. */
template <typename Kv, int kDim, bool kSplit, bool kFew>
__device__ __forceinline__ void walk_range(const AttentionParams& p, const RowPlace& at, const HeadTile& heads,
                                           const KeyRange& range, const uint32_t (&queries)[kDim / 16][4],
                                           RangeWalker<Kv, kDim, kFew>& walker, uint8_t* raw) {
  if constexpr (kSplit) {
    Accumulator<kDim> acc;
    walker.attend(queries, range.first, range.last, acc);
    store_split<Kv, kDim>(p, at, heads, acc, raw);
  } else {
    Accumulator<kDim> total;
    const int size = split_keys(at.keys);
    for (int first = 0; first < at.keys; first += size) {
      Accumulator<kDim> acc;
      walker.attend(queries, first, min(first + size, at.keys), acc);
      merge_split<kDim>(acc, total);
    }
    store_result<Kv, kDim>(p, at.row, heads, total);
  }
}

/* Block (x, y, z): split (if kSplit), row, KV head and tile of its query heads. */
template <typename Kv, int kDim, bool kSplit, bool kFew>
__global__ void __launch_bounds__(kAttentionThreads, kBlocksPerSm<kFew>)
    attention_mma_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<AttentionShared<Kv, kDim, kFew>*>(raw);
  release_successor();
  const bool waits_first = !p.settled && p.choice != RowChoice::kAll;
  if (waits_first) wait_for_predecessor();
  const auto split = static_cast<int>(blockIdx.x);
  const auto unit = static_cast<int>(blockIdx.y);
  const int row = row_of_unit(p, unit);
  if (row < 0) return;
  const HeadTile heads = head_tile(p, static_cast<int>(blockIdx.z));
  const int32_t slot = __ldcg(p.step.row_slots + row);
  const int keys = __ldcg(p.step.positions + row) + 1;
  const int size = split_keys(keys);
  /* No slot is negative: the question keeps the compiler from reading it only after this, a trip later. */
  if (kSplit && (split * size >= keys || slot < 0)) return;
  if (!p.settled && !waits_first) wait_for_predecessor();
  const KvSource<Kv> source = kv_source_of_slot<Kv>(p, slot, heads.kv_head);
  const KeyRange range = kSplit ? KeyRange{split * size, min(split * size + size, keys)} : KeyRange{0, keys};
  /* The predecessor may still be storing the last key and its value. */
  const int copied = range.first + kSlots<Kv, kFew> / 2 * kTileKeys;
  const bool waits_late = p.settled && min(copied, range.last) < keys;
  if (p.settled && !waits_late) wait_for_predecessor();
  RangeWalker<Kv, kDim, kFew> walker(p, source, range, shared);
  if (waits_late) wait_for_predecessor();
  uint32_t queries[kDim / 16][4];
  load_heads<Wide<Kv>, kDim>(row_of<bf16>(p.q, row) + static_cast<int64_t>(heads.first) * kDim, heads.count, queries);
  walk_range<Kv, kDim, kSplit, kFew>(p, {row, unit, split, keys}, heads, range, queries, walker, raw);
}

template <typename Kv, int kDim, bool kSplit, bool kFew>
glm_status launch_attention(glm_device* device, const AttentionParams& p) {
  const auto tiles = static_cast<unsigned>(p.kv.kv_heads * head_tiles(p));
  const int cluster = kSplit ? p.merged_splits : 1;
  const unsigned splits = kSplit ? blocks_for(p.max_splits, cluster) * static_cast<unsigned>(cluster) : 1u;
  const Grid grid{dim3(splits, static_cast<unsigned>(p.units), tiles), kAttentionThreads,
                  sizeof(AttentionShared<Kv, kDim, kFew>), cluster};
  return launch(device, "paged_attention", grid, attention_mma_kernel<Kv, kDim, kSplit, kFew>, p);
}

template <typename Kv, int kDim>
glm_status choose_attention(glm_device* device, const AttentionParams& p, bool split) {
  if (!split) return launch_attention<Kv, kDim, false, false>(device, p);
  if (p.units <= kFewRows) return launch_attention<Kv, kDim, true, true>(device, p);
  return launch_attention<Kv, kDim, true, false>(device, p);
}

}  // namespace

glm_status attention_mma(glm_device* device, const AttentionParams& params, bool split) {
  return with_kv(params.kv.dtype, [&](auto kv) {
    using Kv = std::conditional_t<std::is_same_v<typename decltype(kv)::type, fp8>, fp8, bf16>;
    if (params.kv.head_dim == 64) return choose_attention<Kv, 64>(device, params, split);
    return choose_attention<Kv, 128>(device, params, split);
  });
}

}  // namespace glm::cuda
