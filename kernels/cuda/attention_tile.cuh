/* Keys and values in shared memory: tiles of 64 tokens, copied from their pages some tiles ahead. */
#ifndef GLM_CUDA_ATTENTION_TILE_CUH
#define GLM_CUDA_ATTENTION_TILE_CUH

#include "attention.cuh"
#include "mma.cuh"

namespace glm::cuda {

constexpr int kAttentionThreads = 128;
constexpr int kPagesPerTile = kTileKeys / GLM_PAGE_SIZE;

/* Tiles on their way and in use; two blocks of a multiprocessor fit. */
constexpr int kKvStages = 3;

/* Rows padded by 16 bytes: eight rows of an 8x8 matrix fall into 32 banks. */
template <typename T, int kDim>
struct KvTile {
  static constexpr int kPitch = kDim + 16 / sizeof(T);
  T k[kTileKeys * kPitch];
  T v[kTileKeys * kPitch];
};

/* Keys [first, last) of one row's sequence; `last` is the row's causal limit or the end of a split. */
struct KeyRange {
  int first;
  int last;
};

struct PageIds {
  int32_t ids[kPagesPerTile];
};

/* Where a block's keys come from. */
struct KvSource {
  const uint8_t* k;
  const uint8_t* v;
  const int32_t* pages; /* the sequence's row of the page table */
  int64_t page_stride;  /* elements from page to page */
  int64_t head_offset;  /* elements of the KV heads before this one, within a page */
};

__device__ __forceinline__ KvSource kv_source(const AttentionParams& p, int64_t row, int kv_head) {
  const int64_t head_elements = static_cast<int64_t>(GLM_PAGE_SIZE) * p.kv.head_dim;
  return {static_cast<const uint8_t*>(p.kv.k), static_cast<const uint8_t*>(p.kv.v),
          p.pages.table + static_cast<int64_t>(p.step.row_slots[row]) * p.pages.max_pages,
          p.kv.kv_heads * head_elements, kv_head * head_elements};
}

__device__ __forceinline__ PageIds page_ids(const KvSource& source, const KeyRange& keys, int tile_first) {
  PageIds pages;
#pragma unroll
  for (int i = 0; i < kPagesPerTile; ++i) {
    const int key = tile_first + i * GLM_PAGE_SIZE;
    pages.ids[i] = key < keys.last ? source.pages[key / GLM_PAGE_SIZE] : 0;
  }
  return pages;
}

/* Starts the copies of one tile; keys past the range become zeros, so that nothing unwritten is ever multiplied. */
template <typename T, int kDim>
__device__ __forceinline__ void copy_tile(KvTile<T, kDim>& tile, const KvSource& source, const PageIds& pages,
                                          const KeyRange& keys, int tile_first) {
  constexpr int kPerChunk = 16 / sizeof(T);
  constexpr int kChunks = kDim / kPerChunk;
  constexpr int kKeysPerTurn = kAttentionThreads / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
#pragma unroll
  for (int turn = 0; turn < kTileKeys / kKeysPerTurn; ++turn) {
    const int key = turn * kKeysPerTurn + static_cast<int>(threadIdx.x) / kChunks;
    const bool valid = tile_first + key < keys.last;
    const int page = kKeysPerTurn <= GLM_PAGE_SIZE ? turn * kKeysPerTurn / GLM_PAGE_SIZE : key / GLM_PAGE_SIZE;
    const int64_t at =
        (pages.ids[page] * source.page_stride + source.head_offset + key % GLM_PAGE_SIZE * kDim + chunk * kPerChunk) *
        static_cast<int64_t>(sizeof(T));
    const int to = key * KvTile<T, kDim>::kPitch + chunk * kPerChunk;
    copy_async_16(tile.k + to, source.k + at, valid);
    copy_async_16(tile.v + to, source.v + at, valid);
  }
}

/* Sixteen E4M3 codes as f16, which holds them exactly. */
__device__ __forceinline__ void widen_16(const fp8* from, f16* to) {
  const uint4 codes = *reinterpret_cast<const uint4*>(from);
  const auto widen = [](uint32_t a, uint32_t b) {
    return make_uint4(low_fp8_to_f16x2(a), high_fp8_to_f16x2(a), low_fp8_to_f16x2(b), high_fp8_to_f16x2(b));
  };
  reinterpret_cast<uint4*>(to)[0] = widen(codes.x, codes.y);
  reinterpret_cast<uint4*>(to)[1] = widen(codes.z, codes.w);
}

template <int kDim>
__device__ __forceinline__ void widen_tile(const KvTile<fp8, kDim>& from, KvTile<f16, kDim>& to) {
  constexpr int kChunks = kDim / 16;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kTileKeys * kChunks; i += kAttentionThreads) {
    const int in = i / kChunks * KvTile<fp8, kDim>::kPitch + i % kChunks * 16;
    const int out = i / kChunks * KvTile<f16, kDim>::kPitch + i % kChunks * 16;
    widen_16(from.k + in, to.k + out);
    widen_16(from.v + in, to.v + out);
  }
}

}  // namespace glm::cuda

#endif
