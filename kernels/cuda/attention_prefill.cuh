/* The tiles of a prefill launch, and the warps that copy their keys and values. */
#ifndef GLM_CUDA_ATTENTION_PREFILL_CUH
#define GLM_CUDA_ATTENTION_PREFILL_CUH

#include "attention_wgmma.cuh"
#include "tma.cuh"

namespace glm::cuda {

/* A block: 128 pairs of a row and a query head of one KV head, 64 to each of two multiplying warpgroups, in order of row, and a
 * warpgroup of which one warp copies keys and one values. While one warpgroup takes exponentials the other multiplies (FlashAttention-3,
 * Shah et al. 2024). */
constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kPrefillThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kGroupPairs = 64;
constexpr int kBlockPairs = kConsumers * kGroupPairs;
constexpr int kPrefillStages = 4;
constexpr int kTurnBarrier = 1; /* the first of two named barriers: whose turn it is to multiply */

template <int kDim>
struct PrefillShared {
  static constexpr int kTileBytes = kTileKeys * kDim * 2;
  uint8_t k[kPrefillStages][kTileBytes];
  uint8_t v[kPrefillStages][kTileBytes];
  float4 totals[kConsumers][kDim / 8][kWarpgroup]; /* each thread's sums of the splits before the one at hand */
  Ring<kPrefillStages> k_ring;
  Ring<kPrefillStages> v_ring;
};

/* Where a thread stands in the rings. */
struct TilePlaces {
  RingPlace<kPrefillStages> k;
  RingPlace<kPrefillStages> v;
};

/* What a block computes. */
struct PrefillTile {
  int first_row;  /* of the sequence, in the step */
  int rows;       /* of the sequence */
  int first_pair; /* pair = row * group + head */
  int position;   /* of the sequence's first row */
  int kv_head;
  int keys;

  __device__ __forceinline__ int row_of_pair(int pair, int group) const { return min(pair / group, rows - 1); }
};

/* Tiles in order of sequence, those with the most keys first, KV heads innermost. False: there are fewer tiles. */
__device__ bool find_tile(const AttentionParams& p, int index, PrefillTile& tile) {
  const int tile_index = index / p.kv.kv_heads;
  int before = 0;
  for (int base = 0; base < p.step.num_seqs; base += kWarp) {
    const int seq = base + lane_index();
    const int first = seq < p.step.num_seqs ? p.step.seq_starts[seq] : 0;
    const int rows = seq < p.step.num_seqs ? p.step.seq_starts[seq + 1] - first : 0;
    const int tiles = rows > 1 ? (rows * p.group + kBlockPairs - 1) / kBlockPairs : 0;
    int end = tiles;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, end, offset);
      if (lane_index() >= offset) end += other;
    }
    const int at = tile_index - before;
    const unsigned found = __ballot_sync(0xffffffffu, at < end);
    if (found != 0) {
      const int lane = __ffs(static_cast<int>(found)) - 1;
      tile.first_row = __shfl_sync(0xffffffffu, first, lane);
      tile.rows = __shfl_sync(0xffffffffu, rows, lane);
      tile.first_pair = (__shfl_sync(0xffffffffu, end, lane) - 1 - at) * kBlockPairs;
      tile.kv_head = index % p.kv.kv_heads;
      tile.position = p.step.positions[tile.first_row];
      tile.keys = tile.position + tile.row_of_pair(tile.first_pair + kBlockPairs - 1, p.group) + 1;
      return true;
    }
    before += __shfl_sync(0xffffffffu, end, kWarp - 1);
  }
  return false;
}

/* The tile that a block computes in its turn: forth and back, so that each gets long ones and short ones. */
__device__ __forceinline__ int tile_of_turn(int turn) {
  const auto blocks = static_cast<int>(gridDim.x);
  const auto block = static_cast<int>(blockIdx.x);
  return turn * blocks + (turn % 2 == 0 ? block : blocks - 1 - block);
}

/* The warp that copies K, or V, tile by tile. */
template <int kDim>
class TileLoader {
 public:
  static constexpr int kBlocks = kDim / kColumnBlock;
  static constexpr int kPageBytes = GLM_PAGE_SIZE * kDim * 2;

  __device__ TileLoader(const CUtensorMap& map, const void* data, const AttentionParams& p, const PrefillTile& tile,
                        RingPlace<kPrefillStages>& place)
      : map_(map), data_(static_cast<const uint8_t*>(data)), p_(p), tile_(tile), place_(place) {
    pages_ = p.pages.table + static_cast<int64_t>(p.step.row_slots[tile.first_row]) * p.pages.max_pages;
  }

  /* Keys from 64 * index on into the next stage; those past the block's last key become zeros. */
  __device__ void load(int index, uint8_t* stages, Ring<kPrefillStages>& ring) {
    if (index % (kWarp / kPagesPerTile) == 0) {
      const int page = index * kPagesPerTile + lane_index();
      ids_ = page * GLM_PAGE_SIZE < tile_.keys ? pages_[page] : 0;
    }
    const int page = lane_index() / kBlocks % kPagesPerTile;
    const int block = lane_index() % kBlocks;
    const int id = __shfl_sync(0xffffffffu, ids_, index % (kWarp / kPagesPerTile) * kPagesPerTile + page);
    const int row = (id * p_.kv.kv_heads + tile_.kv_head) * GLM_PAGE_SIZE;
    const int whole_pages = min(kPagesPerTile, (tile_.keys - index * kTileKeys) / GLM_PAGE_SIZE);
    uint8_t* to = stages + place_.stage * PrefillShared<kDim>::kTileBytes;
    ring.wait_empty(place_);
    if (whole_pages < kPagesPerTile) fill_rest(to, index, whole_pages);
    uint64_t* full = &ring.full[place_.stage];
    if (lane_index() == 0) barrier_expect(full, whole_pages * kPageBytes);
    __syncwarp();
    if (lane_index() < whole_pages * kBlocks) {
      copy_box(to + block * kBlockBytes + page * GLM_PAGE_SIZE * kMapRowBytes, &map_, block * kMapRowBytes, row, full);
    }
    place_.advance();
  }

 private:
  /* What the copy engine cannot: it would take all tokens of a page. */
  __device__ void fill_rest(uint8_t* to, int index, int whole_pages) {
    constexpr int kChunks = kDim / 8;
    for (int i = whole_pages * GLM_PAGE_SIZE * kChunks + lane_index(); i < kTileKeys * kChunks; i += kWarp) {
      const int key = i / kChunks;
      const int chunk = i % kChunks;
      const int position = index * kTileKeys + key;
      uint4 value = {};
      if (position < tile_.keys) {
        const int64_t at = token_offset(p_.kv, p_.pages, p_.step.row_slots[tile_.first_row], tile_.kv_head, position);
        value = *reinterpret_cast<const uint4*>(data_ + (at + chunk * 8) * 2);
      }
      *reinterpret_cast<uint4*>(to + chunk / 8 * kBlockBytes + swizzled_offset(key, chunk % 8)) = value;
    }
    fence_async_proxy();
    __syncwarp();
  }

  const CUtensorMap& map_;
  const uint8_t* data_;
  const AttentionParams& p_;
  const PrefillTile& tile_;
  const int32_t* pages_;
  RingPlace<kPrefillStages>& place_;
  int ids_ = 0; /* of 32 pages, one a lane */
};

/* K, or V, of all tiles of the block. */
template <int kDim>
__device__ void load_all(const CUtensorMap& map, const void* data, const AttentionParams& p, uint8_t* stages,
                         Ring<kPrefillStages>& ring) {
  RingPlace<kPrefillStages> place;
  PrefillTile tile;
  for (int turn = 0; find_tile(p, tile_of_turn(turn), tile); ++turn) {
    TileLoader<kDim> loader(map, data, p, tile, place);
    for (int i = 0; i * kTileKeys < tile.keys; ++i) loader.load(i, stages, ring);
  }
}

}  // namespace glm::cuda

#endif
