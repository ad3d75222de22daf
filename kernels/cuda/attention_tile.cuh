/* Keys and values in shared memory: halves of a tile, the keys or the values of 64 tokens, copied from their pages some halves ahead. */
#ifndef GLM_CUDA_ATTENTION_TILE_CUH
#define GLM_CUDA_ATTENTION_TILE_CUH

#include "attention.cuh"
#include "mma.cuh"

namespace glm::cuda {

constexpr int kAttentionThreads = 128;

/* Up to so many rows make about one block a multiprocessor at 4,096 keys. */
constexpr int kFewRows = 16;
template <bool kFew>
constexpr int kBlocksPerSm = kFew ? 2 : 4;

/* Halves on their way and in use; kBlocksPerSm blocks fit. */
template <typename Kv, bool kFew>
constexpr int kSlots = (sizeof(Kv) == 1 ? 5 : 3) * (kFew ? 2 : 1);

/* Rows padded by 16 bytes: eight rows of an 8x8 matrix fall into 32 banks. */
template <typename Kv, int kDim>
constexpr int kPitch = kDim + 16 / sizeof(Kv);

/* K, V, K, V ... of one tile after another, each in the slot of its number modulo kSlots. */
template <typename Kv, int kDim, bool kFew>
using Slots = Kv[kSlots<Kv, kFew>][kTileKeys * kPitch<Kv, kDim>];

/* Keys [first, last) of one row's sequence; `last` is the row's causal limit or the end of a split. */
struct KeyRange {
  int first;
  int last;
};

/* Where a block's keys come from. */
template <typename Kv>
struct KvSource {
  const Kv* k;
  const Kv* v;
  const int32_t* pages; /* the sequence's row of the page table */
  int64_t page_stride;  /* elements from page to page */
};

template <typename Kv>
__device__ __forceinline__ KvSource<Kv> kv_source_of_slot(const AttentionParams& p, int32_t slot, int kv_head) {
  const int64_t head_elements = static_cast<int64_t>(GLM_PAGE_SIZE) * p.kv.head_dim;
  return {static_cast<const Kv*>(p.kv.k) + kv_head * head_elements,
          static_cast<const Kv*>(p.kv.v) + kv_head * head_elements,
          p.pages.table + static_cast<int64_t>(slot) * p.pages.max_pages, p.kv.kv_heads * head_elements};
}

template <typename Kv>
__device__ __forceinline__ KvSource<Kv> kv_source(const AttentionParams& p, int64_t row, int kv_head) {
  return kv_source_of_slot<Kv>(p, __ldcg(p.step.row_slots + row), kv_head);
}

/* The page ids of a sequence, 32 to a warp, one a lane; the next 32 are fetched while these are used. */
class PageIds {
 public:
  static constexpr int kTiles = kWarp / kPagesPerTile;

  __device__ PageIds(const int32_t* pages, const KeyRange& keys)
      : pages_(pages), page_(keys.first / GLM_PAGE_SIZE + static_cast<int>(threadIdx.x) % kWarp), last_(keys.last) {
    ids_ = fetch();
    next_ = fetch();
  }

  /* Of page `page` of tile `tile`, counted from the range's first. */
  __device__ __forceinline__ int32_t id(int tile, int page) const {
    return __shfl_sync(0xffffffffu, ids_, tile % kTiles * kPagesPerTile + page);
  }

  /* Before the first tile that is a multiple of kTiles, other than 0. */
  __device__ __forceinline__ void advance() {
    ids_ = next_;
    next_ = fetch();
  }

 private:
  __device__ __forceinline__ int32_t fetch() {
    const int32_t id = page_ * GLM_PAGE_SIZE < last_ ? __ldcg(pages_ + page_) : 0;
    page_ += kWarp;
    return id;
  }

  const int32_t* pages_;
  int page_; /* this lane's next */
  int last_;
  int32_t ids_;
  int32_t next_;
};

/* Copies the halves of a range in their order, kSlots - 1 ahead of use. */
template <typename Kv, int kDim, bool kFew>
class HalfStream {
 public:
  __device__ HalfStream(const KvSource<Kv>& source, const KeyRange& keys, Slots<Kv, kDim, kFew>& slots)
      : from_{source.k + offset_in_page(), source.v + offset_in_page()},
        page_bytes_(static_cast<uint32_t>(source.page_stride * sizeof(Kv))),
        keys_(keys),
        slots_(slots),
        pages_(source.pages, keys) {
#pragma unroll
    for (int i = 0; i < kSlots<Kv, kFew> - 1; ++i) {
      if (i % 2 == 0) {
        copy_next<false>();
      } else {
        copy_next<true>();
      }
    }
  }

  /* Starts the copy of the next half, which is of values or of keys, where the one before those that are ahead has been read. */
  template <bool kValues>
  __device__ __forceinline__ void copy_next() {
    const int first = keys_.first + tile_ * kTileKeys;
    const auto* from = reinterpret_cast<const uint8_t*>(from_[kValues]);
    if (first + kTileKeys <= keys_.last) {
      copy_half<true>(from, first);
    } else if (first < keys_.last) {
      copy_half<false>(from, first);
    }
    commit_copies();
    slot_ = slot_ == kSlots<Kv, kFew> - 1 ? 0 : slot_ + 1;
    if constexpr (kValues) {
      ++tile_;
      if (tile_ % PageIds::kTiles == 0) pages_.advance();
    }
  }

 private:
  static constexpr int kPerChunk = 16 / sizeof(Kv);
  static constexpr int kChunks = kDim / kPerChunk;
  static constexpr int kKeysPerTurn = kAttentionThreads / kChunks;
  static constexpr int kThreadsPerPage = GLM_PAGE_SIZE * kChunks; /* a chunk each */

  static __device__ __forceinline__ int offset_in_page() {
    return static_cast<int>(threadIdx.x) % kThreadsPerPage * kPerChunk;
  }

  /* Keys past the range become zeros, so that nothing unwritten is ever multiplied. */
  template <bool kWhole>
  __device__ __forceinline__ void copy_half(const uint8_t* from, int first) {
    const unsigned thread = threadIdx.x;
    Kv* to = slots_[slot_] + thread / kChunks * kPitch<Kv, kDim> + thread % kChunks * kPerChunk;
#pragma unroll
    for (int turn = 0; turn < kTileKeys / kKeysPerTurn; ++turn) {
      const int key = turn * kKeysPerTurn; /* of thread 0 */
      const int page = key / GLM_PAGE_SIZE + static_cast<int>(thread / kThreadsPerPage);
      const uint8_t* at = from + static_cast<uint64_t>(static_cast<uint32_t>(pages_.id(tile_, page))) * page_bytes_ +
                          key % GLM_PAGE_SIZE * kDim * static_cast<int>(sizeof(Kv));
      if constexpr (kWhole) {
        copy_async_16(to + key * kPitch<Kv, kDim>, at);
      } else {
        copy_async_16(to + key * kPitch<Kv, kDim>, at, first + key + static_cast<int>(thread / kChunks) < keys_.last);
      }
    }
  }

  const Kv* from_[2]; /* this thread's chunk of a page of keys, of values */
  const uint32_t page_bytes_;
  const KeyRange keys_;
  Slots<Kv, kDim, kFew>& slots_;
  int tile_ = 0; /* of the next half */
  int slot_ = 0;
  PageIds pages_;
};

}  // namespace glm::cuda

#endif
