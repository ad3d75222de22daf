/* Kernels in which ranks read each other's tensors where they lie, between two exchanges of one word a block and tensor. */
#ifndef GLM_CUDA_EXCHANGE_CUH
#define GLM_CUDA_EXCHANGE_CUH

#include <algorithm>

#include "exchange.h"
#include "launch.h"
#include "numeric.cuh"
#include "peers.cuh"

namespace glm::cuda {

constexpr int kMeetThreads = 512;
constexpr int kMaxMeetBlocks = 128; /* the same on every rank: each block meets those of its own index */
static_assert(kMaxMeetBlocks <= kLanes);

/* By all threads of every block, once its predecessor has ended. work(tensors), tensors[i][rank] being the addresses, while no rank's stream
 * goes on. It is not called after an abort. */
template <int N, typename Work>
__device__ void meet(const Meeting<N>& meeting, Work&& work) {
  __shared__ uint64_t tensors[N][kMaxPeers];
  const Peers& peers = meeting.peers;
  if (blockIdx.x == 0 && threadIdx.x == 0 && peers.num_ranks > 1) count_exchange(peers);
  if (meeting.brought) {
    work(meeting.tensors);
    return;
  }
  Lane lane(peers, static_cast<int>(blockIdx.x));
  /* What kernels before this one wrote is there for the others once they have the address. */
  __threadfence_system();
  lane.gather(meeting.own, tensors);
  __threadfence_system();
  bool all = true;
  for (int peer = 0; peer < peers.num_ranks; ++peer) all = all && tensors[0][peer] != 0;
  if (all) work(tensors);
  __threadfence_system();
  const uint64_t done[1] = {0};
  lane.gather(done, tensors);
  lane.close();
}

/* By all threads of a block: waits for the same block of all ranks. False after an abort. */
__device__ inline bool arrive(const Peers& peers) {
  __shared__ uint64_t arrived[1][kMaxPeers];
  Lane lane(peers, static_cast<int>(blockIdx.x));
  __threadfence_system();
  const uint64_t here[1] = {1};
  lane.gather(here, arrived);
  __threadfence_system();
  lane.close();
  bool all = true;
  for (int peer = 0; peer < peers.num_ranks; ++peer) all = all && arrived[0][peer] != 0;
  return all;
}

/* `items`: of the rank that has most, one a thread. */
inline Grid meet_grid(int64_t items) {
  return {dim3(std::min<unsigned>(kMaxMeetBlocks, std::max(1u, blocks_for(items, kMeetThreads)))), kMeetThreads};
}

/* Calls f(item) for the items of this thread, [0, count) in all. */
template <typename F>
__device__ __forceinline__ void for_each_item(int64_t count, F&& f) {
  const int64_t step = int64_t{gridDim.x} * kMeetThreads;
  for (int64_t item = int64_t{blockIdx.x} * kMeetThreads + threadIdx.x; item < count; item += step) f(item);
}

constexpr int kUnitBytes = 16; /* that one thread copies at a time */

__host__ __device__ inline int64_t units_of(int64_t row_bytes) {
  return (row_bytes + kUnitBytes - 1) / kUnitBytes;
}

/* Bytes [16 * unit, 16 * unit + 16) of a row, as far as it goes. */
__device__ __forceinline__ void copy_unit(const std::byte* from, std::byte* to, int64_t unit, int64_t row_bytes) {
  const int64_t at = unit * kUnitBytes;
  from += at;
  to += at;
  const bool aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % kUnitBytes == 0;
  if (aligned && at + kUnitBytes <= row_bytes) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    return;
  }
  for (int64_t i = 0; i < kUnitBytes && at + i < row_bytes; ++i) to[i] = from[i];
}

/* A tensor's rows as bytes. */
struct ByteRows {
  int64_t row_bytes;
  int64_t stride_bytes;

  __device__ std::byte* of(uint64_t tensor, int64_t row) const {
    return reinterpret_cast<std::byte*>(tensor) + row * stride_bytes;
  }
};

inline ByteRows byte_rows(const glm_tensor& x) {
  const auto bytes = static_cast<int64_t>(bytes_of(x.dtype));
  return {x.cols * bytes, x.stride * bytes};
}

}  // namespace glm::cuda

#endif
