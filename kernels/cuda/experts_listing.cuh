/* The assignments of each local expert, as a block of the expert layers on wgmma has them in shared memory. */
#ifndef GLM_CUDA_EXPERTS_LISTING_CUH
#define GLM_CUDA_EXPERTS_LISTING_CUH

#include "experts_wgmma.h"
#include "wgmma_tile.cuh"

namespace glm::cuda {

struct Listing {
  const int32_t* offsets; /* [count + 1] */
  const int32_t* order;   /* in global memory unless all are listed */
};

inline size_t listing_bytes(const ExpertParams& p) {
  return (static_cast<size_t>(p.first.count) + 1 + p.listed) * sizeof(int32_t);
}

/* By the first warp: counts[i + 1] becomes the sum of counts[1] to counts[i + 1]; counts[0] is 0. */
__device__ __forceinline__ void sum_up(int32_t* counts, int n) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int32_t before = 0;
  for (int base = 0; base < n; base += kWarp) {
    int32_t sum = base + lane < n ? counts[base + lane] : 0;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int32_t lower = __shfl_up_sync(0xffffffffu, sum, offset);
      sum += lane >= offset ? lower : 0;
    }
    if (base + lane < n) counts[base + lane] = before + sum;
    before += __shfl_sync(0xffffffffu, sum, kWarp - 1);
  }
}

/* What moe_group lists, from the ids; in any order within an expert. */
__device__ __forceinline__ void group_ids(const ExpertParams& p, int32_t* offsets, int32_t* order) {
  constexpr int kEach = kMostListed / kWgmmaThreads;
  const int count = p.first.count;
  const int thread = static_cast<int>(threadIdx.x);
  int32_t experts[kEach];
  int32_t places[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int a = thread + i * kWgmmaThreads;
    experts[i] = a < p.listed ? __ldcg(row_of<int32_t>(p.ids, a / p.in.top_k) + a % p.in.top_k) - p.first_id : -1;
  }
  for (int i = thread; i <= count; i += kWgmmaThreads) offsets[i] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (experts[i] < 0 || experts[i] >= count) experts[i] = -1;
    if (experts[i] >= 0) places[i] = atomicAdd(&offsets[experts[i] + 1], 1);
  }
  __syncthreads();
  if (thread < kWarp) sum_up(offsets, count + 1);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (experts[i] >= 0) order[offsets[experts[i]] + places[i]] = thread + i * kWgmmaThreads;
  }
}

/* By the whole block, which meets at a barrier afterwards. `room`: listing_bytes. */
__device__ __forceinline__ Listing find_listing(const ExpertParams& p, int32_t* room) {
  const int count = p.first.count;
  int32_t* order = room + count + 1;
  if (p.by_ids) {
    group_ids(p, room, order);
  } else {
    for (int i = static_cast<int>(threadIdx.x); i <= count; i += kWgmmaThreads) room[i] = __ldcg(p.in.offsets + i);
    for (int i = static_cast<int>(threadIdx.x); i < p.listed; i += kWgmmaThreads) order[i] = __ldcg(p.in.order + i);
  }
  return {room, p.listed > 0 ? order : p.in.order};
}

}  // namespace glm::cuda

#endif
