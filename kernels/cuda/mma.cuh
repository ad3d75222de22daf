/* Tensor-core and asynchronous-copy instructions that sm_90a and sm_100a share, as thin wrappers of PTX. */
#ifndef GLM_CUDA_MMA_CUH
#define GLM_CUDA_MMA_CUH

#include "numeric.cuh"

namespace glm::cuda {

/* d[16][8] += a[16][16] b[16][8], f32 accumulators. Lane = 4 * group + member: a0, a1 (+ a2, a3: 8 columns on) are rows group and
 * group + 8; b is column `group`; d0, d1 are row `group`, columns 2 * member and the next; d2, d3 are row group + 8. */
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_16x8x16<f16>(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<bf16>(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The lower (upper) two of four E4M3 codes as two f16, exactly. */
__device__ __forceinline__ uint32_t low_fp8_to_f16x2(uint32_t codes) {
  uint32_t halves;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(halves) : "r"(codes));
  return halves;
}

__device__ __forceinline__ uint32_t high_fp8_to_f16x2(uint32_t codes) {
  uint32_t halves;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(halves) : "r"(codes));
  return halves;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/* 16 bytes from global to shared memory. Both addresses aligned to 16. */
__device__ __forceinline__ void copy_async_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

/* Likewise; zeros if `valid` is false. */
__device__ __forceinline__ void copy_async_16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

/* Likewise, of a row whose next bytes follow soon: L2 fetches 256 at a time. */
__device__ __forceinline__ void copy_streamed_16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most `kPending` of this thread's committed groups are still on their way. */
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/* 16 bytes that are read once: they need no place in L1. */
__device__ __forceinline__ uint4 load_streaming_16(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

/* Barrier of a cluster's blocks before which nothing was written that others read after it. */
__device__ __forceinline__ void cluster_leave_together() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/* The four 8x8 matrices of 16-bit elements whose rows lanes 0-7, 8-15, 16-23, 24-31 point at. */
__device__ __forceinline__ void load_matrices(uint32_t r[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t r[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

}  // namespace glm::cuda

#endif
