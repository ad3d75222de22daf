/* FP8 keys and values of a prefill launch. The copying warpgroup brings their codes to shared memory, each thread some of its own, and
 * widens them to f16 where the multiplies read them. */
#ifndef GLM_CUDA_ATTENTION_CODES_CUH
#define GLM_CUDA_ATTENTION_CODES_CUH

#include "attention_prefill.cuh"
#include "attention_tile.cuh"

namespace glm::cuda {

constexpr int kCodeTiles = 2; /* on their way */

/* A thread's codes of K and V, 16 at a time. */
template <int kDim>
using CodeStages = uint4[2][kCodeTiles][kTileKeys * kDim / 16 / kWarpgroup][kWarpgroup];

template <int kDim>
struct CodedShared {
  PrefillShared<kDim> tiles;
  CodeStages<kDim> codes;
};

template <int kDim>
struct PlainShared {
  PrefillShared<kDim> tiles;
};

template <typename Kv, int kDim>
using KvShared = std::conditional_t<std::is_same_v<Kv, fp8>, CodedShared<kDim>, PlainShared<kDim>>;

/* Arrivals that fill a stage. */
template <typename Kv>
constexpr int kLoaders = std::is_same_v<Kv, fp8> ? kWarpgroup / kWarp : 1;

/* The codes of one tile of pairs, 64 keys after another. */
template <int kDim>
class CodeLoader {
 public:
  __device__ CodeLoader(const AttentionParams& p, const PrefillTile& tile, CodeStages<kDim>& stages)
      : source_(kv_source<fp8>(p, tile.first_row, tile.kv_head)),
        keys_(tile.keys),
        stages_(stages),
        pages_(source_.pages, {0, tile.keys}) {}

  /* Starts the copy of keys (values) from 64 * index on; those past the last become zeros. */
  template <bool kValues>
  __device__ __forceinline__ void copy(int index) {
    if (!kValues && index > 0 && index % PageIds::kTiles == 0) pages_.advance();
    const fp8* from = (kValues ? source_.v : source_.k) + thread_ % kChunks * 16;
    if (index * kTileKeys < keys_) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int key = key_of(turn);
        const int64_t page = pages_.id(index, key / GLM_PAGE_SIZE) * source_.page_stride;
        copy_async_16(&stages_[kValues][index % kCodeTiles][turn][thread_], from + page + key % GLM_PAGE_SIZE * kDim,
                      index * kTileKeys + key < keys_);
      }
    }
    commit_copies();
  }

  /* Of the oldest copy, once it has arrived, into the next stage. Keys take the order of columns that queries have (load_queries). */
  template <bool kValues>
  __device__ __forceinline__ void widen(int index, uint8_t* stages, Ring<kPrefillStages>& ring,
                                        RingPlace<kPrefillStages>& place) {
    wait_copies<2 * kCodeTiles - 1>();
    ring.wait_empty(place);
    uint8_t* to = stages + place.stage * PrefillShared<kDim>::kTileBytes;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const uint4 codes = stages_[kValues][index % kCodeTiles][turn][thread_];
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
      uint32_t wide[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wide[kValues ? 2 * i : i] = low_fp8_to_f16x2(words[i]);
        wide[kValues ? 2 * i + 1 : 4 + i] = high_fp8_to_f16x2(words[i]);
      }
      const int chunk = thread_ % kChunks * 2; /* of eight elements */
      uint8_t* block = to + chunk / 8 * kBlockBytes;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint4*>(block + swizzled_offset(key_of(turn), chunk % 8 + i)) =
            make_uint4(wide[4 * i], wide[4 * i + 1], wide[4 * i + 2], wide[4 * i + 3]);
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(&ring.full[place.stage]);
    place.advance();
  }

 private:
  static constexpr int kChunks = kDim / 16;
  static constexpr int kKeysPerTurn = kWarpgroup / kChunks;
  static constexpr int kTurns = kTileKeys / kKeysPerTurn;

  __device__ __forceinline__ int key_of(int turn) const { return turn * kKeysPerTurn + thread_ / kChunks; }

  const int thread_ = static_cast<int>(threadIdx.x) % kWarpgroup;
  const KvSource<fp8> source_;
  const int keys_;
  CodeStages<kDim>& stages_;
  PageIds pages_;
};

/* Keys and values of all tiles of the block. */
template <int kDim>
__device__ void widen_all(const AttentionParams& p, CodedShared<kDim>& shared) {
  TilePlaces places;
  PrefillTile tile;
  for (int turn = 0; find_tile(p, tile_of_turn(turn), tile); ++turn) {
    CodeLoader<kDim> loader(p, tile, shared.codes);
#pragma unroll
    for (int i = 0; i < kCodeTiles; ++i) {
      loader.template copy<false>(i);
      loader.template copy<true>(i);
    }
    for (int i = 0; i * kTileKeys < tile.keys; ++i) {
      loader.template widen<false>(i, shared.tiles.k[0], shared.tiles.k_ring, places.k);
      loader.template copy<false>(i + kCodeTiles);
      loader.template widen<true>(i, shared.tiles.v[0], shared.tiles.v_ring, places.v);
      loader.template copy<true>(i + kCodeTiles);
    }
  }
}

}  // namespace glm::cuda

#endif
