/* Sums of rows over the ranks, for messages that are small enough to be sent before anybody asks for them.
 *
 * An empty slot has all bits of every word set, and no word of a message has: so a word is its own flag, and neither flags nor
 * fences are sent (as TensorRT-LLM's one-shot all-reduce does with -0). A reader empties what it has read. A slot is written again two operations
 * later: its sender has then had rows of the operation between from every rank, sent by a kernel that began after the one that emptied
 * the slot had ended.
 *
 * One shot: every rank sends its rows to all, and each adds them up. Two shots: it sends a row to the rank that has it as
 * its own, which sends the sum to all. */
#ifndef GLM_CUDA_PEER_ROWS_CUH
#define GLM_CUDA_PEER_ROWS_CUH

#include "peers.cuh"
#include "row.cuh"

namespace glm::cuda {

/* One block's rows are its own; all blocks of the kernel take part. */
template <typename Act>
class PeerRows {
 public:
  __device__ PeerRows(const Peers& peers, int32_t cols, bool two_shots)
      : peers_(peers),
        patience_(peers),
        packs_((cols + kPack - 1) / kPack),
        two_shots_(two_shots),
        epoch_(*static_cast<const volatile uint32_t*>(&header()->epoch)) {}

  /* This rank's pack, before any `sum` of the same row. */
  __device__ void send(int64_t row, int32_t first, const float values[kPack]) const {
    const Message message = packed(values);
    for (int peer = 0; peer < peers_.num_ranks; ++peer) {
      if (peer != peers_.rank && (!two_shots_ || peer == owner(row)))
        put(rows_of(peer, peers_.rank), row, first, message);
    }
  }

  /* values[8]: this rank's pack, and then the sum over the ranks, ascending, in f32, rounded to Act. */
  __device__ void sum(int64_t row, int32_t first, float values[kPack]) {
    const ExchangeLayout layout{peers_.num_ranks};
    if (two_shots_ && owner(row) != peers_.rank) {
      unpack(take(reinterpret_cast<uint4*>(own_block() + layout.sums(epoch_)), row, first), values);
      return;
    }
    add_up(row, first, values);
    if (!two_shots_) return;
    const Message message = packed(values);
    for (int peer = 0; peer < peers_.num_ranks; ++peer) {
      if (peer != peers_.rank)
        put(reinterpret_cast<uint4*>(peers_.blocks[peer] + layout.sums(epoch_)), row, first, message);
    }
  }

  /* By all threads, after a barrier of the block that all of them reached later than the constructor. */
  __device__ void close() {
    if (threadIdx.x != 0 || atomicInc(&header()->arrived, gridDim.x - 1) != gridDim.x - 1) return;
    header()->epoch = epoch_ + 1;
  }

 private:
  static constexpr int kQuads = static_cast<int>(sizeof(Act) * kPack / sizeof(uint4));
  static constexpr uint32_t kEmpty = 0xffffffffu;

  struct alignas(16) Message {
    uint4 quads[kQuads];
  };

  /* kEmpty is one or two NaN: another stands for them. */
  static __device__ uint32_t sendable(uint32_t word) { return word == kEmpty ? kEmpty >> 1 : word; }
  static __device__ bool is_full(uint4 quad) {
    return quad.x != kEmpty && quad.y != kEmpty && quad.z != kEmpty && quad.w != kEmpty;
  }

  static __device__ Message packed(const float values[kPack]) {
    PackOf<Act> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) pack.values[i] = from_float<Act>(values[i]);
    Message message;
    memcpy(&message, &pack, sizeof(message));
#pragma unroll
    for (uint4& quad : message.quads) {
      quad = make_uint4(sendable(quad.x), sendable(quad.y), sendable(quad.z), sendable(quad.w));
    }
    return message;
  }

  static __device__ void unpack(const Message& message, float values[kPack]) {
    PackOf<Act> pack;
    memcpy(&pack, &message, sizeof(pack));
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = to_float(pack.values[i]);
  }

  __device__ std::byte* own_block() const { return peers_.blocks[peers_.rank]; }
  __device__ ExchangeHeader* header() const { return reinterpret_cast<ExchangeHeader*>(own_block()); }
  __device__ int owner(int64_t row) const { return static_cast<int>(row % peers_.num_ranks); }
  __device__ uint4* rows_of(int receiver, int sender) const {
    return reinterpret_cast<uint4*>(peers_.blocks[receiver] + ExchangeLayout{peers_.num_ranks}.rows(epoch_, sender));
  }
  __device__ int64_t place(int64_t row, int32_t first) const { return (row * packs_ + first / kPack) * kQuads; }

  __device__ void put(uint4* to, int64_t row, int32_t first, const Message& message) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) store_shared_with_peers(to + place(row, first) + i, message.quads[i]);
  }

  __device__ Message take(uint4* from, int64_t row, int32_t first) {
    Message message = {};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      uint4* slot = from + place(row, first) + i;
      patience_.wait([&] { return is_full(message.quads[i] = load_shared_with_peers(slot)); });
      store_shared_with_peers(slot, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
    }
    return message;
  }

  __device__ void add_up(int64_t row, int32_t first, float values[kPack]) {
    float own[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) own[i] = values[i];
    for (int peer = 0; peer < peers_.num_ranks; ++peer) {
      float theirs[kPack];
      if (peer != peers_.rank) unpack(take(rows_of(peers_.rank, peer), row, first), theirs);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float term = peer == peers_.rank ? own[i] : theirs[i];
        values[i] = peer == 0 ? term : values[i] + term;
      }
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = rounded_to<Act>(values[i]);
  }

  const Peers& peers_;
  Patience patience_;
  int32_t packs_;
  bool two_shots_;
  uint32_t epoch_;
};

}  // namespace glm::cuda

#endif
