#include "attention_codes.cuh"
#include "attention_queries.cuh"
#include "launch.h"

namespace glm::cuda {

namespace {

/* A lane's part of 64 pairs: two of them, half of their columns by fours. T: what is multiplied. */
template <typename T, int kDim>
class PairSums {
 public:
  static constexpr int kSums = kDim / 2;

  __device__ PairSums(const AttentionParams& p, const PrefillTile& tile, PrefillShared<kDim>& shared,
                      TilePlaces& places)
      : p_(p), tile_(tile), shared_(shared), places_(places), group_(static_cast<int>(threadIdx.x) / kWarpgroup) {
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / kWarp;
    const bf16* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pairs_[half] = tile.first_pair + group_ * kGroupPairs + warp * 16 + lane_group() + half * 8;
      positions_[half] = tile.position + tile.row_of_pair(pairs_[half], p.group);
      next_split_[half] = split_keys(positions_[half] + 1);
      rows[half] = element<bf16>(p.q, half);
    }
    first_position_ = tile.position + tile.row_of_pair(pairs_[0] - lane_group(), p.group);
    load_queries<T, kDim>(rows, queries_);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) total(i) = {};
  }

  static __device__ __forceinline__ void give_turn_to(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(kTurnBarrier + group), "n"(kConsumers * kWarpgroup) : "memory");
  }

  /* Sums over all keys of the block. */
  __device__ void run() {
    const int tiles = (tile_.keys + kTileKeys - 1) / kTileKeys;
    float scores[kTileScores];
    uint32_t weights[kTileKeys / 16][4];
    shared_.k_ring.wait_full(places_.k);
    wgmma_fence();
    start_scores<T, kDim>(scores, queries_, keys_ + places_.k.stage * kStageUnits);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(scores);
    release(shared_.k_ring, places_.k);
    weigh(scores, 0);
    pack_weights<T>(scores, weights);
    for (int i = 1; i < tiles; ++i) {
      shared_.k_ring.wait_full(places_.k);
      take_turn();
      pin_registers(sums_);
      wgmma_fence();
      start_scores<T, kDim>(scores, queries_, keys_ + places_.k.stage * kStageUnits);
      wgmma_commit();
      shared_.v_ring.wait_full(places_.v);
      start_sums<T, kDim>(sums_, weights, values_ + places_.v.stage * kStageUnits);
      wgmma_commit();
      give_turn();
      wgmma_wait<1>();
      pin_registers(scores);
      release(shared_.k_ring, places_.k);
      if (ends_split(i * kTileKeys)) {
        finish_sums<0>();
        merge_split(i * kTileKeys);
        weigh(scores, i * kTileKeys);
        rescale(sums_, factors_);
      } else {
        weigh(scores, i * kTileKeys);
        finish_grown_sums(scores);
      }
      pack_weights<T>(scores, weights);
    }
    shared_.v_ring.wait_full(places_.v);
    pin_registers(sums_);
    wgmma_fence();
    start_sums<T, kDim>(sums_, weights, values_ + places_.v.stage * kStageUnits);
    wgmma_commit();
    finish_sums<3>();
  }

  __device__ void store() {
    merge_rows({true, true});
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!exists(half)) continue;
      bf16* out = element<bf16>(p_.out, half) + lane_member() * 2;
      const bool aligned = reinterpret_cast<uintptr_t>(out) % 4 == 0;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const float4 sums = total(i);
        const float x = normalized(half == 0 ? sums.x : sums.z, totals_[half].sum);
        const float y = normalized(half == 0 ? sums.y : sums.w, totals_[half].sum);
        if (aligned) {
          *reinterpret_cast<uint32_t*>(out + i * 8) = pack(x, y, bf16{});
        } else {
          out[i * 8] = from_float<bf16>(x);
          out[i * 8 + 1] = from_float<bf16>(y);
        }
      }
    }
  }

 private:
  struct Rows {
    bool at[2];
  };
  static constexpr uint32_t kStageUnits = PrefillShared<kDim>::kTileBytes / 16; /* of a descriptor */

  __device__ __forceinline__ bool exists(int half) const { return pairs_[half] < tile_.rows * p_.group; }

  template <typename Act>
  __device__ __forceinline__ Act* element(const glm_tensor& tensor, int half) const {
    const int pair = min(pairs_[half], tile_.rows * p_.group - 1);
    const int head = tile_.kv_head * p_.group + pair % p_.group;
    return row_of<Act>(tensor, tile_.first_row + pair / p_.group) + static_cast<int64_t>(head) * kDim;
  }

  __device__ __forceinline__ float4& total(int i) { return shared_.totals[group_][i][threadIdx.x % kWarpgroup]; }

  __device__ __forceinline__ void take_turn() const { named_barrier(kTurnBarrier + group_, kConsumers * kWarpgroup); }
  __device__ __forceinline__ void give_turn() const { give_turn_to(1 - group_); }

  __device__ __forceinline__ void release(Ring<kPrefillStages>& ring, RingPlace<kPrefillStages>& place) const {
    if (lane_index() == 0) barrier_arrive(&ring.empty[place.stage]);
    place.advance();
  }

  /* kPlace tells calls apart that the compiler would otherwise make one of. */
  template <int kPlace>
  __device__ __forceinline__ void finish_sums() {
    asm volatile("/* place %0 */" ::"n"(kPlace));
    wgmma_wait<0>();
    pin_registers(sums_);
    release(shared_.v_ring, places_.v);
  }

  /* The branch keeps the wait behind the exponentials, which are so taken while the sums are still multiplied. */
  __device__ __forceinline__ void finish_grown_sums(float (&scores)[kTileScores]) {
    const bool grown = has_grown(factors_);
    pin_registers(scores);
    if (grown) {
      finish_sums<1>();
      rescale(sums_, factors_);
    } else {
      finish_sums<2>();
    }
  }

  __device__ __forceinline__ void weigh(float (&scores)[kTileScores], int first_key) {
    if (first_key + kTileKeys - 1 > first_position_) mask_scores(scores, first_key, positions_);
    softmax_tile(scores, p_.softmax_scale, rows_, factors_);
  }

  /* Whether a split of one of the warp's rows ends before this key. A row past its last key stays as it is. */
  __device__ __forceinline__ bool ends_split(int first_key) const {
    return __any_sync(0xffffffffu, row_ends_split(first_key, 0) || row_ends_split(first_key, 1)) != 0;
  }
  __device__ __forceinline__ bool row_ends_split(int first_key, int half) const {
    return first_key == next_split_[half] && first_key <= positions_[half];
  }

  __device__ void merge_split(int first_key) {
    const Rows rows{{row_ends_split(first_key, 0), row_ends_split(first_key, 1)}};
    merge_rows(rows);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows.at[half]) next_split_[half] += split_keys(positions_[half] + 1);
    }
  }

  /* Adds what these rows hold to their totals, and begins anew. */
  __device__ void merge_rows(const Rows& rows) {
    MergeFactors factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SoftmaxState state = split_state(rows_, half, p_.softmax_scale);
      if (!rows.at[half]) continue;
      factors[half] = merge(totals_[half], state.max, state.sum);
      rows_.max[half] = -INFINITY;
      rows_.sum[half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      float4 sums = total(i);
      if (rows.at[0]) {
        sums.x = take(sums.x, i * 4, factors[0]);
        sums.y = take(sums.y, i * 4 + 1, factors[0]);
      }
      if (rows.at[1]) {
        sums.z = take(sums.z, i * 4 + 2, factors[1]);
        sums.w = take(sums.w, i * 4 + 3, factors[1]);
      }
      total(i) = sums;
    }
  }
  __device__ __forceinline__ float take(float before, int i, const MergeFactors& factors) {
    const float sum = merged(before, sums_[i], factors);
    sums_[i] = 0.0f;
    return sum;
  }

  const AttentionParams& p_;
  const PrefillTile& tile_;
  PrefillShared<kDim>& shared_;
  TilePlaces& places_;
  const uint32_t keys_ = keys_descriptor(shared_.k[0]);
  const uint32_t values_ = values_descriptor(shared_.v[0]);
  const int group_; /* warpgroup */
  int pairs_[2];
  int positions_[2];
  int next_split_[2];  /* first key of the row's next split */
  int first_position_; /* of the warp's rows */
  uint32_t queries_[kDim / 16][4];
  float sums_[kSums] = {};
  float factors_[2];
  TileRows rows_;
  SoftmaxState totals_[2];
};

template <typename T, int kDim>
__device__ void multiply_all(const AttentionParams& p, PrefillShared<kDim>& shared) {
  TilePlaces places;
  if (threadIdx.x / kWarpgroup == 1) PairSums<T, kDim>::give_turn_to(0);
  PrefillTile tile;
  for (int turn = 0; find_tile(p, tile_of_turn(turn), tile); ++turn) {
    PairSums<T, kDim> pairs(p, tile, shared, places);
    pairs.run();
    pairs.store();
  }
}

/* Keys and values of all tiles of the block. */
template <typename Kv, int kDim>
__device__ void load_all(const AttentionParams& p, KvShared<Kv, kDim>& shared) {
  if constexpr (std::is_same_v<Kv, fp8>) {
    widen_all<kDim>(p, shared);
  } else {
    const int loader = (static_cast<int>(threadIdx.x) - kConsumers * kWarpgroup) / kWarp;
    if (loader == 0) load_all<kDim>(p.k_map, p.kv.k, p, shared.tiles.k[0], shared.tiles.k_ring);
    if (loader == 1) load_all<kDim>(p.v_map, p.kv.v, p, shared.tiles.v[0], shared.tiles.v_ring);
  }
}

/* Blocks stay for the whole launch: keys of the next tile are copied while the last ones of this are multiplied. */
template <typename Kv, int kDim>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    attention_prefill_kernel(const __grid_constant__ AttentionParams p) {
#if GLM_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<KvShared<Kv, kDim>*>(raw);
  if (threadIdx.x == 0) {
    if constexpr (std::is_same_v<Kv, bf16>) {
      prefetch_map(&p.k_map);
      prefetch_map(&p.v_map);
    }
    shared.tiles.k_ring.init(kLoaders<Kv>, kConsumers * kWarpgroup / kWarp);
    shared.tiles.v_ring.init(kLoaders<Kv>, kConsumers * kWarpgroup / kWarp);
  }
  __syncthreads();
  begin_kernel();
  constexpr bool kWidens = std::is_same_v<Kv, fp8>;
  if (threadIdx.x >= kConsumers * kWarpgroup) {
    leave_registers<kWidens ? 56 : 40>();
    load_all<Kv, kDim>(p, shared);
  } else {
    take_registers<kWidens ? 224 : 232>();
    multiply_all<Wide<Kv>, kDim>(p, shared.tiles);
  }
#endif
}

template <typename Kv, int kDim>
glm_status launch_prefill(glm_device* device, const AttentionParams& p) {
  const int rows = p.step.num_rows;
  const int most = (rows * p.group / kBlockPairs + min(p.step.num_seqs, rows / 2)) * p.kv.kv_heads;
  const Grid grid{dim3(static_cast<unsigned>(min(most, device->sm_count))), kPrefillThreads,
                  sizeof(KvShared<Kv, kDim>)};
  return launch(device, "paged_attention (prefill)", grid, attention_prefill_kernel<Kv, kDim>, p);
}

template <typename Kv>
glm_status choose_prefill(glm_device* device, const AttentionParams& p) {
  return p.kv.head_dim == 64 ? launch_prefill<Kv, 64>(device, p) : launch_prefill<Kv, 128>(device, p);
}

}  // namespace

glm_status attention_prefill(glm_device* device, const AttentionParams& params) {
  return params.kv.dtype == GLM_BF16 ? choose_prefill<bf16>(device, params) : choose_prefill<fp8>(device, params);
}

}  // namespace glm::cuda
