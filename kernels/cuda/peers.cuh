/* How a kernel sends to and receives from the other ranks' GPUs. Nobody waits any more once the group is aborted: then what
 * is received is nothing, and no result counts. */
#ifndef GLM_CUDA_PEERS_CUH
#define GLM_CUDA_PEERS_CUH

#include "kernel.cuh"
#include "peers.h"

namespace glm::cuda {

/* 16 bytes that another GPU writes or reads at the same time. Each 8 of them arrive together. */
__device__ __forceinline__ uint4 load_shared_with_peers(const uint4* from) {
  uint4 value;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_with_peers(uint4* to, uint4 value) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

/* By one thread of a kernel that is an exchange. Nobody waits for it. */
__device__ __forceinline__ void count_exchange(const Peers& peers) {
  auto* const header = reinterpret_cast<ExchangeHeader*>(peers.blocks[peers.rank]);
  const uint64_t begun = ++header->begun;
  *static_cast<volatile uint64_t*>(peers.begun) = begun;
}

/* One thread's: waits for others end with an abort. The flag is host memory, so it is looked at seldom. */
class Patience {
 public:
  explicit __device__ Patience(const Peers& peers) : aborted_(peers.aborted) {}

  /* Repeats poll() until it is true. False after an abort, and from then on without polling. */
  template <typename Poll>
  __device__ bool wait(Poll&& poll) {
    for (uint32_t i = 1; !lost_; ++i) {
      if (poll()) return true;
      if (i % kPollsBetweenLooks == 0) lost_ = *static_cast<const volatile uint32_t*>(aborted_) != 0;
    }
    return false;
  }
  __device__ bool lost() const { return lost_; }

 private:
  static constexpr uint32_t kPollsBetweenLooks = 1024;

  const uint32_t* aborted_;
  bool lost_ = false;
};

/* Through which one block exchanges 8-byte words with the block of the same lane on every rank, all of them as often as each other. A word
 * travels with the number of its exchange in each half, so no fence is needed to see it whole (NCCL's LL protocol). A slot is
 * written again two exchanges later: its sender has then had an answer to the one between, given after this one was read. */
class Lane {
 public:
  __device__ Lane(const Peers& peers, int lane)
      : peers_(peers), patience_(peers), lane_(lane), epoch_(header()->lane_epochs[lane]) {}

  static __device__ constexpr bool alone() { return false; }

  __device__ int num_ranks() const { return peers_.num_ranks; }
  __device__ int rank() const { return peers_.rank; }
  __device__ bool lost() const { return patience_.lost(); }

  /* By all threads of the block. all[i][rank] = mine[i] of every rank, in shared memory, after the call. A rank that is lost has 0. */
  template <int N>
  __device__ void gather(const uint64_t (&mine)[N], uint64_t (*all)[kMaxPeers]) {
    begin();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < peers_.num_ranks) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (peer != peers_.rank) send(peer, i, mine[i]);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) all[i][peer] = peer == peers_.rank ? mine[i] : receive(peer, i);
    }
    __syncthreads();
  }

  /* By all threads of the block, at most kLaneWords. visit(word) for the word of the same thread on every rank, in order of rank. */
  template <typename Visit>
  __device__ void each(uint64_t mine, Visit&& visit) {
    begin();
    const int word = static_cast<int>(threadIdx.x);
    for (int peer = 0; peer < peers_.num_ranks; ++peer) {
      if (peer != peers_.rank) send(peer, word, mine);
    }
    for (int peer = 0; peer < peers_.num_ranks; ++peer) visit(peer == peers_.rank ? mine : receive(peer, word));
  }

  /* By all threads, after the last exchange. */
  __device__ void close() {
    if (threadIdx.x == 0) header()->lane_epochs[lane_] = epoch_;
  }

 private:
  __device__ ExchangeHeader* header() const { return reinterpret_cast<ExchangeHeader*>(peers_.blocks[peers_.rank]); }

  /* Whoever answers has read what came before. */
  __device__ void begin() {
    ++epoch_;
    __syncthreads();
  }

  __device__ uint4* slot(int owner, int sender, int word) const {
    const ExchangeLayout layout{peers_.num_ranks};
    return reinterpret_cast<uint4*>(peers_.blocks[owner] + layout.words(lane_, epoch_, sender)) + word;
  }

  __device__ void send(int peer, int word, uint64_t value) const {
    const uint4 marked = make_uint4(static_cast<uint32_t>(value), epoch_, static_cast<uint32_t>(value >> 32), epoch_);
    store_shared_with_peers(slot(peer, peers_.rank, word), marked);
  }

  __device__ uint64_t receive(int peer, int word) {
    uint4 found = {};
    const uint4* from = slot(peers_.rank, peer, word);
    const bool arrived = patience_.wait([&] {
      found = load_shared_with_peers(from);
      return found.y == epoch_ && found.w == epoch_;
    });
    return arrived ? static_cast<uint64_t>(found.z) << 32 | found.x : 0;
  }

  const Peers& peers_;
  Patience patience_;
  int lane_;
  uint32_t epoch_;
};

/* The lane of a rank that has nobody to exchange words with. */
struct NoLane {
  static __device__ constexpr bool alone() { return true; }
  static __device__ constexpr bool lost() { return false; }
  static __device__ constexpr int num_ranks() { return 1; }
  static __device__ constexpr int rank() { return 0; }
  template <int N>
  __device__ void gather(const uint64_t (&)[N], uint64_t (*)[kMaxPeers]) {}
  template <typename Visit>
  __device__ void each(uint64_t, Visit&&) {}
  __device__ void close() {}
};

}  // namespace glm::cuda

#endif
