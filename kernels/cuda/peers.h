/* What the ranks of a group exchange data through: a block of memory on each rank's GPU that the others write to. */
#ifndef GLM_CUDA_PEERS_H
#define GLM_CUDA_PEERS_H

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "glm/kernels.h"

namespace glm::cuda {

constexpr int kMaxPeers = 32;                     /* ranks of a group */
constexpr int kLanes = 256;                       /* blocks of a kernel that exchange words at once */
constexpr int kLaneWords = 1024;                  /* of one block: a thread each */
constexpr size_t kMessageBytes = size_t{4} << 20; /* of one rank, in one operation */

/* Of this rank alone. */
struct ExchangeHeader {
  uint64_t begun;               /* exchanges of any kind */
  uint32_t epoch;               /* operations that have exchanged rows */
  uint32_t arrived;             /* blocks of the running one that have read `epoch` */
  uint32_t lane_epochs[kLanes]; /* exchanges of each lane */
};

/* The parts of a block: the header; words [lane][2][sender][kLaneWords], 16 bytes each; rows [2][sender], and sums [2], of
 * kMessageBytes each. Two of everything: one may still be read while the other is written. */
struct ExchangeLayout {
  static constexpr size_t kWordsOffset = 4096;
  static_assert(sizeof(ExchangeHeader) <= kWordsOffset);

  int num_ranks;

  __host__ __device__ size_t words(int lane, uint32_t epoch, int sender) const {
    return kWordsOffset + ((static_cast<size_t>(lane) * 2 + epoch % 2) * num_ranks + sender) * kLaneWords * 16;
  }
  __host__ __device__ size_t rows(uint32_t epoch, int sender) const {
    return words(kLanes, 0, 0) + (static_cast<size_t>(epoch % 2) * num_ranks + sender) * kMessageBytes;
  }
  __host__ __device__ size_t sums(uint32_t epoch) const {
    return rows(0, 0) + 2 * num_ranks * kMessageBytes + epoch % 2 * kMessageBytes;
  }
  __host__ __device__ size_t bytes() const { return sums(0) + 2 * kMessageBytes; }
};

/* A rank's view of its group; a kernel's parameter. */
struct Peers {
  int32_t rank = 0;
  int32_t num_ranks = 1;             /* 1: alone */
  uint64_t* begun = nullptr;         /* the host's: exchanges that this rank has begun */
  const uint32_t* aborted = nullptr; /* the host's: not 0 once nobody is to wait any more */
  std::byte* blocks[kMaxPeers] = {}; /* of each rank */
};

}  // namespace glm::cuda

#endif
