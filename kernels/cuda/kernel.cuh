/* What every kernel shares: dependent launch, warp and block reductions in a fixed order. */
#ifndef GLM_CUDA_KERNEL_CUH
#define GLM_CUDA_KERNEL_CUH

#include <cstdint>

namespace glm::cuda {

constexpr int kWarp = 32;

/* Until the kernels before this one have finished and their writes are visible. */
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* Lets the next kernel's blocks take free multiprocessors now; they wait for this grid's end themselves. */
__device__ __forceinline__ void release_successor() {
  asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ void begin_kernel() {
  release_successor();
  wait_for_predecessor();
}

/* For kernels that leave room beside themselves, and may run beside their predecessor (beside.h). */
__device__ __forceinline__ void begin_turn(bool beside) {
  if (!beside) wait_for_predecessor();
  release_successor();
}
__device__ __forceinline__ void end_turn(bool beside) {
  if (beside) wait_for_predecessor();
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/* Sum over the block, the same in every thread, in a fixed order. `shared`: one float a warp; reusable after the call. */
__device__ __forceinline__ float block_sum(float x, float* shared) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  x = warp_sum(x);
  if (lane == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  const float total = warp_sum(lane < warps ? shared[lane] : 0.0f);
  __syncthreads();
  return total;
}

__device__ __forceinline__ uint32_t block_max(uint32_t x, uint32_t* shared) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  x = __reduce_max_sync(0xffffffffu, x);
  if (lane == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  const uint32_t largest = __reduce_max_sync(0xffffffffu, lane < warps ? shared[lane] : 0u);
  __syncthreads();
  return largest;
}

}  // namespace glm::cuda

#endif
