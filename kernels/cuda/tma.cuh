/* Tensor copies (TMA) between memory and the shared memory of a cluster's blocks, and what its kernels need beside them. sm_90 and later. */
#ifndef GLM_CUDA_TMA_CUH
#define GLM_CUDA_TMA_CUH

#include <cuda.h>

#include "mbarrier.cuh"
#include "wgmma.cuh"

namespace glm::cuda {

/* Arrives, and makes the phase wait for `bytes` more that copies bring. */
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

/* Arrives at the barrier that lies at the same place in block `rank` of the cluster. */
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

/* Where this block's shared memory lies in block `rank` of the cluster. */
__device__ __forceinline__ uint32_t cluster_address(const void* shared, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}

/* The map's box at (column, row) to `to`; its bytes count at `full`. */
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int column, int row, uint64_t* full) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(column), "r"(row)
      : "memory");
}

/* Likewise to the same places in every block of the cluster named in `blocks`. */
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int column, int row, uint64_t* full,
                                         uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

/* Shared memory to the map's box at (column, row), but for what lies beyond the matrix. This thread's copies since the last commit are one
 * group; wait_stores: until at most kPending groups still read shared memory. Writes of other threads to shared memory need a fence first
 * (fence_async_proxy). */
__device__ __forceinline__ void store_box(const CUtensorMap* map, int column, int row, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(column), "r"(row)
               : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/* Fetches a map of the kernel's parameters for the copies to come. */
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Points a map in shared memory at another matrix of the same shape. */
__device__ __forceinline__ void redirect_map(CUtensorMap* shared_map, const void* data, int64_t stride) {
  asm volatile(
      "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(shared_address(shared_map)),
      "l"(data)
      : "memory");
  asm volatile(
      "tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;" ::"r"(shared_address(shared_map)),
      "l"(stride)
      : "memory");
}

/* By a warp: the map to memory, where another kernel's copies may use it after acquire_map. */
__device__ __forceinline__ void publish_map(CUtensorMap* to, const CUtensorMap* shared_map) {
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(
          to),
      "r"(shared_address(shared_map))
      : "memory");
}

__device__ __forceinline__ void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/* By every thread of the cluster's blocks; after the wait each sees what all had stored before they arrived. */
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
/* Likewise by blocks that only tell that they have started, and that their barriers are initialised. */
__device__ __forceinline__ void cluster_arrive_started() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

/* Registers of this warpgroup's threads from here on. */
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#if GLM_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
#if GLM_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/* Four 8x8 matrices of 16-bit elements, transposed, to the rows that lanes 0-7, 8-15, 16-23, 24-31 point at. */
__device__ __forceinline__ void store_matrices_transposed(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace glm::cuda

#endif
