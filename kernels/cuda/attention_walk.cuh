/* The walk of a block along a range of a row's keys: copies run ahead, four warps score, weigh and sum tile by tile. */
#ifndef GLM_CUDA_ATTENTION_WALK_CUH
#define GLM_CUDA_ATTENTION_WALK_CUH

#include "attention_multiply.cuh"

namespace glm::cuda {

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

}  // namespace glm::cuda

#endif
