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

/* 16 bytes to a place in the cluster's shared memory, which count at the barrier `arrived` of the same block. */
__device__ __forceinline__ void send_16(uint32_t address, const float values[4], uint32_t arrived) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
      "r"(arrived), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
      : "memory");
}
/* Until the phase of this parity has completed; then what other blocks of the cluster sent with it is there. */
__device__ __forceinline__ void barrier_wait_cluster(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait_again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra wait_again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace glm::cuda

#endif
