/* Large messages: each rank adds up its part of the packs, which it reads from all ranks, and writes the sums to all. Over the links
 * go 2 * (ranks - 1) / ranks times the message, half of it as reads and half as writes. */
#include <algorithm>

#include "collective.h"
#include "launch.h"
#include "peers.cuh"
#include "row.cuh"

namespace glm::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kMaxBlocks = 128; /* the same on every rank: each block meets those of its own index */
static_assert(kMaxBlocks <= kLanes);

template <typename Act>
__device__ void add_up(const Peers& peers, const uint64_t* tensors, const glm_tensor& x, int64_t row, int32_t first) {
  const int64_t offset = row * x.stride;
  float sum[kPack];
  for (int peer = 0; peer < peers.num_ranks; ++peer) {
    float term[kPack];
    load_pack(reinterpret_cast<const Act*>(tensors[peer]) + offset, first, x.cols, term);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] = peer == 0 ? term[i] : sum[i] + term[i];
  }
  for (int peer = 0; peer < peers.num_ranks; ++peer) {
    store_pack(reinterpret_cast<Act*>(tensors[peer]) + offset, first, x.cols, sum);
  }
}

/* Not after an abort. */
__device__ bool all_have_come(const Peers& peers, const uint64_t* tensors) {
  bool all = true;
  for (int peer = 0; peer < peers.num_ranks; ++peer) all = all && tensors[peer] != 0;
  return all;
}

template <typename Act>
__global__ void __launch_bounds__(kThreads)
    all_reduce_in_place_kernel(const __grid_constant__ Peers peers, glm_tensor x, int32_t rows) {
  __shared__ uint64_t tensors[1][kMaxPeers];
  begin_kernel();
  Lane lane(peers, static_cast<int>(blockIdx.x));
  if (blockIdx.x == 0 && threadIdx.x == 0) count_exchange(peers);
  /* What kernels before this one wrote is there for the others once they have the address. */
  __threadfence_system();
  lane.gather({reinterpret_cast<uint64_t>(x.data)}, tensors);
  __threadfence_system();
  const int64_t packs = (x.cols + kPack - 1) / kPack;
  const int64_t end = rows * packs * (peers.rank + 1) / peers.num_ranks;
  int64_t at = rows * packs * peers.rank / peers.num_ranks + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (all_have_come(peers, tensors[0])) {
    for (; at < end; at += int64_t{gridDim.x} * kThreads) {
      add_up<Act>(peers, tensors[0], x, at / packs, static_cast<int32_t>(at % packs) * kPack);
    }
  }
  __threadfence_system();
  lane.gather({uint64_t{0}}, tensors);
  lane.close();
}

}  // namespace

glm_status all_reduce_in_place(glm_device* device, const glm_tensor& x, int32_t rows) {
  const int64_t packs = int64_t{rows} * blocks_for(x.cols, kPack) / device->peers.num_ranks + 1;
  const Grid grid{dim3(std::min<unsigned>(kMaxBlocks, blocks_for(packs, kThreads))), kThreads};
  return with_act(x.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "all_reduce", grid, all_reduce_in_place_kernel<Act>, device->peers, x, rows);
  });
}

}  // namespace glm::cuda
