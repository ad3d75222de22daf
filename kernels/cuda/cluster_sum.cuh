/* Sums that the blocks of a cluster send to the block that adds them: stores that count at its barrier. A barrier of the cluster instead would make every block
 * fence all its writes, and then fetch the sums over a second trip. sm_90 and later. */
#ifndef GLM_CUDA_CLUSTER_SUM_CUH
#define GLM_CUDA_CLUSTER_SUM_CUH

#include "tma.cuh"

namespace glm::cuda {

/* By one thread, before the block arrives (cluster_arrive_started): `barrier` completes once `bytes` have come, for which it is waited with
 * barrier_wait_cluster. Who sends waits first (cluster_wait), so that all blocks have started. */
__device__ __forceinline__ void expect_sums(uint64_t* barrier, uint32_t bytes) {
  barrier_init(barrier, 1);
  barrier_init_fence();
  barrier_expect(barrier, bytes);
}

/* To where `to` lies in block `rank` of the cluster; counts at the barrier there. */
__device__ __forceinline__ void send_sum(float* to, uint64_t* barrier, uint32_t rank, float value) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(cluster_address(to, rank)),
      "r"(__float_as_uint(value)), "r"(cluster_address(barrier, rank))
      : "memory");
}

}  // namespace glm::cuda

#endif
