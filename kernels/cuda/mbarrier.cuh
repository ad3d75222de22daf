/* Barriers in shared memory that count arrivals, and the ring of stages that producers fill and consumers empty. */
#ifndef GLM_CUDA_MBARRIER_CUH
#define GLM_CUDA_MBARRIER_CUH

#include "mma.cuh"

namespace glm::cuda {

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/* Makes initialised barriers visible to the cluster and to asynchronous copies. */
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Arrives once this thread's asynchronous copies so far have landed; the arrival is one of those the barrier expects. */
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Until the phase of this parity has completed. */
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait_again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait_again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/* Where a thread stands in the ring. */
template <int kStages>
struct RingPlace {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    stage = stage == kStages - 1 ? 0 : stage + 1;
    parity ^= stage == 0 ? 1 : 0;
  }
};

/* One barrier for each stage's data, one for its room. */
template <int kStages>
struct Ring {
  uint64_t full[kStages];
  uint64_t empty[kStages];

  __device__ __forceinline__ void init(int producers, int consumers) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&full[i], producers);
      barrier_init(&empty[i], consumers);
    }
    barrier_init_fence();
  }
  __device__ __forceinline__ void wait_empty(const RingPlace<kStages>& at) {
    barrier_wait(&empty[at.stage], at.parity ^ 1);
  }
  __device__ __forceinline__ void wait_full(const RingPlace<kStages>& at) { barrier_wait(&full[at.stage], at.parity); }
};

/* Of `threads` threads that name the same barrier; 0 is __syncthreads'. */
__device__ __forceinline__ void named_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/* Of the whole block, of which some warps have met at a named barrier while others waited here. Twice for compute-sanitizer alone: racecheck takes the
 * first meeting for over once those warps have met. */
__device__ __forceinline__ void meet_all_roles() {
  __syncthreads();
  __syncthreads();
}

}  // namespace glm::cuda

#endif
