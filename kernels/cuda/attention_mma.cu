#include "attention_merge.cuh"
#include "launch.h"

namespace glm::cuda {

namespace {

/* Shared memory of a block. */
template <typename Kv, int kDim, bool kFew>
struct AttentionShared {
  Slots<Kv, kDim, kFew> slots;
  Wide<Kv> probabilities[kMmaHeads * kProbabilityPitch];
  float4 maxima[kMmaHeads]; /* of the four warps */
  float2 sums[kWarps][kWarp];
};

/* `count` query heads from `q` on as the A operand. */
template <typename T, int kDim>
__device__ __forceinline__ void load_heads(const bf16* q, int count, uint32_t (&out)[kDim / 16][4]) {
  const bf16* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half] = q + min(lane_group() + half * 8, count - 1) * kDim; /* what lies past the last head is never stored */
  }
  load_queries<T, kDim>(rows, out);
}

__device__ __forceinline__ float max_of_warps(const float4& values) {
  return fmaxf(fmaxf(values.x, values.y), fmaxf(values.z, values.w));
}

/* The largest score of each head among this warp's keys, to shared memory. */
template <typename Kv, int kDim, bool kFew>
__device__ __forceinline__ void share_maxima(AttentionShared<Kv, kDim, kFew>& shared, const float (&scores)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float own =
        fmaxf(fmaxf(scores[0][2 * half], scores[0][2 * half + 1]), fmaxf(scores[1][2 * half], scores[1][2 * half + 1]));
    const float largest = quad_max(own);
    if (lane_member() == 0) reinterpret_cast<float*>(shared.maxima + lane_group() + half * 8)[warp_index()] = largest;
  }
}

/* softmax_tile by four warps, once all have shared their maxima: probabilities and their sums go to shared memory; what was summed before
 * is rescaled by `before`. */
template <typename Kv, int kDim, bool kFew>
__device__ __forceinline__ void weigh(AttentionShared<Kv, kDim, kFew>& shared, float scale, const float (&scores)[2][4],
                                      Accumulator<kDim>& acc, float (&before)[2]) {
  float sums[2];
  const float4 maxima[2] = {shared.maxima[lane_group()], shared.maxima[lane_group() + 8]};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_group() + half * 8;
    const float largest = fmaxf(acc.rows.max[half], max_of_warps(maxima[half]));
    const float offset = largest * scale;
    before[half] = exp2_approx(acc.rows.max[half] * scale - offset);
    acc.rows.max[half] = largest;
    sums[half] = 0.0f;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float x = exp2_approx(fmaf(scores[tile][2 * half], scale, -offset));
      const float y = exp2_approx(fmaf(scores[tile][2 * half + 1], scale, -offset));
      sums[half] += x + y;
      const int at = row * kProbabilityPitch + warp_index() * kKeysPerWarp + tile * 8 + lane_member() * 2;
      *reinterpret_cast<uint32_t*>(shared.probabilities + at) = pack(x, y, Wide<Kv>{});
    }
  }
  shared.sums[warp_index()][lane_index()] = make_float2(sums[0], sums[1]);
  for (auto& of_tile : acc.sums) rescale(of_tile, before);
}

/* In the order of softmax_tile, once all warps have shared their sums. */
template <typename Kv, int kDim, bool kFew>
__device__ __forceinline__ void add_sums(const AttentionShared<Kv, kDim, kFew>& shared, const float (&before)[2],
                                         TileRows& rows) {
  float2 s[kWarps];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) s[warp] = shared.sums[warp][lane_index()];
  rows.sum[0] = fmaf(rows.sum[0], before[0], (s[0].x + s[1].x) + (s[2].x + s[3].x));
  rows.sum[1] = fmaf(rows.sum[1], before[1], (s[0].y + s[1].y) + (s[2].y + s[3].y));
}

/* Walks a range of keys; a slot is filled anew as soon as all warps have read it. */
template <typename Kv, int kDim, bool kFew>
class RangeWalker {
 public:
  __device__ RangeWalker(const AttentionParams& p, const KvSource<Kv>& source, const KeyRange& keys,
                         AttentionShared<Kv, kDim, kFew>& shared)
      : p_(p), shared_(shared), stream_(source, keys, shared.slots) {}

  /* Online softmax over keys [first, last), which come next. */
  __device__ __forceinline__ void attend(const uint32_t (&queries)[kDim / 16][4], int first, int last,
                                         Accumulator<kDim>& acc) {
    for (; first < last; first += kTileKeys) {
      if constexpr (std::is_same_v<Kv, fp8>) {
        add_coded_tile(queries, last - first, acc);
      } else {
        add_tile(queries, last - first, acc);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) acc.states[half] = split_state(acc.rows, half, p_.softmax_scale);
  }

 private:
  static constexpr bool kEvenSlots = kSlots<Kv, kFew> % 2 == 0;

  __device__ __forceinline__ void add_tile(const uint32_t (&queries)[kDim / 16][4], int keys, Accumulator<kDim>& acc) {
    wait_copies<kSlots<Kv, kFew> - 2>();
    __syncthreads();
    stream_.template copy_next<kEvenSlots>();
    float scores[2][4] = {};
    score_keys<Kv, kDim>(queries, next_slot(), keys, scores);
    share_maxima(shared_, scores);
    __syncthreads();
    stream_.template copy_next<!kEvenSlots>();
    float before[2];
    weigh(shared_, p_.softmax_scale, scores, acc, before);
    wait_copies<kSlots<Kv, kFew> - 1>();
    __syncthreads();
    add_sums(shared_, before, acc.rows);
    add_values<kDim>(shared_.probabilities, next_slot(), acc);
  }

  /* Likewise. Codes of values are few enough to be read before the probabilities are known. So all warps have read them at the last
   * barrier, at which the next tile's keys are there: it needs none of its own. */
  __device__ __forceinline__ void add_coded_tile(const uint32_t (&queries)[kDim / 16][4], int keys,
                                                 Accumulator<kDim>& acc) {
    constexpr int kOthers = kSlots<Kv, kFew> - 2;
    if (!begun_) {
      wait_copies<kOthers>();
      __syncthreads();
      begun_ = true;
    }
    stream_.template copy_next<kEvenSlots>();
    float scores[2][4] = {};
    score_keys<Kv, kDim>(queries, next_slot(), keys, scores);
    share_maxima(shared_, scores);
    wait_copies<kOthers>();
    __syncthreads();
    const ValueCodes<kDim> values(next_slot());
    stream_.template copy_next<!kEvenSlots>();
    float before[2];
    weigh(shared_, p_.softmax_scale, scores, acc, before);
    wait_copies<kOthers>();
    __syncthreads();
    add_sums(shared_, before, acc.rows);
    add_values<kDim>(shared_.probabilities, values, acc);
  }

  __device__ __forceinline__ const Kv* next_slot() {
    const Kv* slot = shared_.slots[slot_];
    slot_ = slot_ == kSlots<Kv, kFew> - 1 ? 0 : slot_ + 1;
    return slot;
  }

  const AttentionParams& p_;
  AttentionShared<Kv, kDim, kFew>& shared_;
  HalfStream<Kv, kDim, kFew> stream_;
  int slot_ = 0;
  bool begun_ = false;
};

template <typename Kv, int kDim>
__device__ void store_partial(const AttentionParams& p, int64_t unit, int first_head, int heads, int split,
                              const Accumulator<kDim>& acc) {
  const int64_t base = (unit * p.heads + first_head) * p.max_splits + split;
  for_each_run<Kv, kDim>(acc, heads, [&](int head, int column, auto sums, int half) {
    const int64_t at = base + static_cast<int64_t>(head) * p.max_splits;
    *reinterpret_cast<decltype(sums)*>(p.partial_sums + at * kDim + column) = sums;
    if (column == 0) p.partial_weights[at] = make_float2(acc.states[half].max, acc.states[half].sum);
  });
}

template <typename Kv, int kDim>
__device__ void store_result(const AttentionParams& p, int64_t row, int first_head, int heads,
                             const Accumulator<kDim>& acc) {
  bf16* out = row_of<bf16>(p.out, row) + static_cast<int64_t>(first_head) * kDim;
  for_each_pair<Kv, kDim>(acc, heads, [&](int head, int column, float2 sums, int half) {
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

/* A split of a row's keys. */
struct SplitPlace {
  int row;
  int unit;
  int split;
  int splits;
};

/* The row's result if there is but one split or a cluster has all of them; else this split's, for the merge. `raw`: shared memory. */
template <typename Kv, int kDim>
__device__ __forceinline__ void store_split(const AttentionParams& p, const SplitPlace& at, int first_head, int heads,
                                            const Accumulator<kDim>& acc, uint8_t* raw) {
  if (at.splits == 1) {
    store_result<Kv, kDim>(p, at.row, first_head, heads, acc);
  } else if (at.splits <= p.merged_splits) {
    auto& result = *reinterpret_cast<SplitResult<kDim>*>(raw);
    static_assert(sizeof(result) <= sizeof(Slots<Kv, kDim, false>));
    __syncthreads(); /* all warps have read the last slot */
    share_split<Kv, kDim>(acc, heads, result);
    bf16* out = row_of<bf16>(p.out, at.row) + static_cast<int64_t>(first_head) * kDim;
    merge_cluster<kDim>(result, at.split, at.splits, heads, out);
  } else {
    store_partial<Kv, kDim>(p, at.unit, first_head, heads, at.split, acc);
  }
}

/* Block (x, y, z): split (if kSplit), row, KV head and tile of its query heads. */
template <typename Kv, int kDim, bool kSplit, bool kFew>
__global__ void __launch_bounds__(kAttentionThreads, kBlocksPerSm<kFew>)
    attention_mma_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<AttentionShared<Kv, kDim, kFew>*>(raw);
  release_successor();
  if (!p.settled) wait_for_predecessor();
  const auto unit = static_cast<int>(blockIdx.y);
  const auto split = static_cast<int>(blockIdx.x);
  const int row = row_of_unit(p, unit);
  if (row < 0) return;
  const int tiles_per_kv_head = (p.group + kMmaHeads - 1) / kMmaHeads;
  const int kv_head = static_cast<int>(blockIdx.z) / tiles_per_kv_head;
  const int first_in_group = static_cast<int>(blockIdx.z) % tiles_per_kv_head * kMmaHeads;
  const int first_head = kv_head * p.group + first_in_group;
  const int heads = min(kMmaHeads, p.group - first_in_group);
  const int32_t slot = __ldcg(p.step.row_slots + row);
  const int keys = __ldcg(p.step.positions + row) + 1;
  const int size = split_keys(keys);
  if (kSplit && (split * size >= keys || slot < 0))
    return; /* no slot is: the compiler shall not read it only after this */
  const KvSource<Kv> source = kv_source_of_slot<Kv>(p, slot, kv_head);
  const KeyRange range = kSplit ? KeyRange{split * size, min(split * size + size, keys)} : KeyRange{0, keys};
  /* The predecessor may still be storing the last key and its value. */
  const int copied = range.first + kSlots<Kv, kFew> / 2 * kTileKeys;
  const bool waits_late = p.settled && min(copied, range.last) < keys;
  if (p.settled && !waits_late) wait_for_predecessor();
  RangeWalker<Kv, kDim, kFew> walker(p, source, range, shared);
  if (waits_late) wait_for_predecessor();
  uint32_t queries[kDim / 16][4];
  load_heads<Wide<Kv>, kDim>(row_of<bf16>(p.q, row) + static_cast<int64_t>(first_head) * kDim, heads, queries);
  if constexpr (kSplit) {
    Accumulator<kDim> acc;
    walker.attend(queries, range.first, range.last, acc);
    store_split<Kv, kDim>(p, {row, unit, split, num_splits(keys)}, first_head, heads, acc, raw);
  } else {
    Accumulator<kDim> total;
    for (int first = 0; first < keys; first += size) {
      Accumulator<kDim> acc;
      walker.attend(queries, first, min(first + size, keys), acc);
      merge_split<kDim>(acc, total);
    }
    store_result<Kv, kDim>(p, row, first_head, heads, total);
  }
}

template <typename Kv, int kDim, bool kSplit, bool kFew>
glm_status launch_attention(glm_device* device, const AttentionParams& p) {
  const auto tiles = static_cast<unsigned>(p.kv.kv_heads * ((p.group + kMmaHeads - 1) / kMmaHeads));
  const int cluster = kSplit && p.max_splits > 1 ? p.merged_splits : 1;
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
