#include "attention_multiply.cuh"
#include "launch.h"

namespace glm::cuda {

namespace {

/* Shared memory of a block. */
template <typename Kv, int kDim>
struct AttentionShared {
  Slots<Kv, kDim> slots;
  Wide<Kv> probabilities[kMmaHeads * kProbabilityPitch];
  float maxima[kWarps][kMmaHeads];
  float2 sums[kWarps][kWarp];
};

/* `count` query heads from `q` on as the A operand. */
template <typename T, int kDim>
__device__ __forceinline__ void load_heads(const bf16* q, int count, uint32_t (&out)[kDim / 16][4]) {
  const bf16* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = lane_group() + half * 8;
    rows[half] = head < count ? q + head * kDim : nullptr;
  }
  load_queries<T, kDim>(rows, out);
}

__device__ __forceinline__ float max_of_warps(const float values[kWarps][kMmaHeads], int row) {
  return fmaxf(fmaxf(values[0][row], values[1][row]), fmaxf(values[2][row], values[3][row]));
}

/* The largest score of each head among this warp's keys, to shared memory. */
template <typename Kv, int kDim>
__device__ __forceinline__ void share_maxima(AttentionShared<Kv, kDim>& shared, const float (&scores)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float own =
        fmaxf(fmaxf(scores[0][2 * half], scores[0][2 * half + 1]), fmaxf(scores[1][2 * half], scores[1][2 * half + 1]));
    const float largest = quad_max(own);
    if (lane_member() == 0) shared.maxima[warp_index()][lane_group() + half * 8] = largest;
  }
}

/* softmax_tile by four warps, once all have shared their maxima: probabilities and their sums go to shared memory; what was summed before
 * is rescaled by `before`. */
template <typename Kv, int kDim>
__device__ __forceinline__ void weigh(AttentionShared<Kv, kDim>& shared, float scale, const float (&scores)[2][4],
                                      Accumulator<kDim>& acc, float (&before)[2]) {
  float sums[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_group() + half * 8;
    const float largest = fmaxf(acc.rows.max[half], max_of_warps(shared.maxima, row));
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
template <typename Kv, int kDim>
__device__ __forceinline__ void add_sums(const AttentionShared<Kv, kDim>& shared, const float (&before)[2],
                                         TileRows& rows) {
  float2 s[kWarps];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) s[warp] = shared.sums[warp][lane_index()];
  rows.sum[0] = fmaf(rows.sum[0], before[0], (s[0].x + s[1].x) + (s[2].x + s[3].x));
  rows.sum[1] = fmaf(rows.sum[1], before[1], (s[0].y + s[1].y) + (s[2].y + s[3].y));
}

/* Walks a range of keys; a slot is filled anew as soon as all warps have read it. */
template <typename Kv, int kDim>
class RangeWalker {
 public:
  __device__ RangeWalker(const AttentionParams& p, const KvSource<Kv>& source, const KeyRange& keys,
                         AttentionShared<Kv, kDim>& shared)
      : p_(p), shared_(shared), stream_(source, keys, shared.slots) {}

  /* Online softmax over keys [first, last), which come next. */
  __device__ __forceinline__ void attend(const uint32_t (&queries)[kDim / 16][4], int first, int last,
                                         Accumulator<kDim>& acc) {
    constexpr bool kEvenSlots = kSlots<Kv> % 2 == 0;
    for (; first < last; first += kTileKeys) {
      wait_copies<kSlots<Kv> - 2>();
      __syncthreads();
      stream_.template copy_next<kEvenSlots>();
      float scores[2][4] = {};
      score_keys<Kv, kDim>(queries, next_slot(), last - first, scores);
      share_maxima(shared_, scores);
      __syncthreads();
      stream_.template copy_next<!kEvenSlots>();
      float before[2];
      weigh(shared_, p_.softmax_scale, scores, acc, before);
      wait_copies<kSlots<Kv> - 1>();
      __syncthreads();
      add_sums(shared_, before, acc.rows);
      add_values<kDim>(shared_.probabilities, next_slot(), acc);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) acc.states[half] = split_state(acc.rows, half, p_.softmax_scale);
  }

 private:
  __device__ __forceinline__ const Kv* next_slot() {
    const Kv* slot = shared_.slots[slot_];
    slot_ = slot_ == kSlots<Kv> - 1 ? 0 : slot_ + 1;
    return slot;
  }

  const AttentionParams& p_;
  AttentionShared<Kv, kDim>& shared_;
  HalfStream<Kv, kDim> stream_;
  int slot_ = 0;
};

template <typename Kv, int kDim>
__device__ void store_partial(const AttentionParams& p, int64_t unit, int first_head, int heads, int split,
                              const Accumulator<kDim>& acc) {
  const int64_t base = (unit * p.heads + first_head) * p.max_splits + split;
  for_each_pair<Kv, kDim>(acc, heads, [&](int head, int column, float2 sums, int half) {
    const int64_t at = base + static_cast<int64_t>(head) * p.max_splits;
    *reinterpret_cast<float2*>(p.partial_sums + at * kDim + column) = sums;
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

/* Block (x, y, z): split (if kSplit), row, KV head and tile of its query heads. */
template <typename Kv, int kDim, bool kSplit>
__global__ void __launch_bounds__(kAttentionThreads, kBlocksPerSm)
    attention_mma_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<AttentionShared<Kv, kDim>*>(raw);
  begin_kernel();
  const auto unit = static_cast<int>(blockIdx.y);
  const auto split = static_cast<int>(blockIdx.x);
  const int row = row_of_unit(p, unit);
  if (row < 0) return;
  const int tiles_per_kv_head = (p.group + kMmaHeads - 1) / kMmaHeads;
  const int kv_head = static_cast<int>(blockIdx.z) / tiles_per_kv_head;
  const int first_in_group = static_cast<int>(blockIdx.z) % tiles_per_kv_head * kMmaHeads;
  const int first_head = kv_head * p.group + first_in_group;
  const int heads = min(kMmaHeads, p.group - first_in_group);
  const int keys = p.step.positions[row] + 1;
  const int size = split_keys(keys);
  if (kSplit && split * size >= keys) return;
  const KvSource<Kv> source = kv_source<Kv>(p, row, kv_head);
  const KeyRange range = kSplit ? KeyRange{split * size, min(split * size + size, keys)} : KeyRange{0, keys};
  RangeWalker<Kv, kDim> walker(p, source, range, shared);
  uint32_t queries[kDim / 16][4];
  load_heads<Wide<Kv>, kDim>(row_of<bf16>(p.q, row) + static_cast<int64_t>(first_head) * kDim, heads, queries);
  if constexpr (kSplit) {
    Accumulator<kDim> acc;
    walker.attend(queries, range.first, range.last, acc);
    if (size >= keys) {
      store_result<Kv, kDim>(p, row, first_head, heads, acc);
    } else {
      store_partial<Kv, kDim>(p, unit, first_head, heads, split, acc);
    }
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

template <typename Kv, int kDim>
glm_status launch_attention(glm_device* device, const AttentionParams& p, bool split) {
  const auto tiles = static_cast<unsigned>(p.kv.kv_heads * ((p.group + kMmaHeads - 1) / kMmaHeads));
  const Grid grid{dim3(split ? static_cast<unsigned>(p.max_splits) : 1u, static_cast<unsigned>(p.units), tiles),
                  kAttentionThreads, sizeof(AttentionShared<Kv, kDim>)};
  if (split) return launch(device, "paged_attention", grid, attention_mma_kernel<Kv, kDim, true>, p);
  return launch(device, "paged_attention", grid, attention_mma_kernel<Kv, kDim, false>, p);
}

}  // namespace

glm_status attention_mma(glm_device* device, const AttentionParams& params, bool split) {
  return with_kv(params.kv.dtype, [&](auto kv) {
    using Kv = std::conditional_t<std::is_same_v<typename decltype(kv)::type, fp8>, fp8, bf16>;
    if (params.kv.head_dim == 64) return launch_attention<Kv, 64>(device, params, split);
    return launch_attention<Kv, 128>(device, params, split);
  });
}

}  // namespace glm::cuda
