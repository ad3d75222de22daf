/* Hopper's warpgroup multiply (wgmma): d[64][N] += a[64][k] b[N][k], both from shared memory, f32 accumulators. k is 32 bytes of a row.
 *
 * Thread = 32 * warp + 4 * group + member of the warpgroup: d[4 j], d[4 j + 1] are row 16 * warp + group, columns 8 j + 2 * member and the
 * next; d[4 j + 2], d[4 j + 3] are row 16 * warp + group + 8. The instruction exists on sm_90a only. */
#ifndef GLM_CUDA_WGMMA_CUH
#define GLM_CUDA_WGMMA_CUH

#include "mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GLM_HAS_WGMMA 1
#else
#define GLM_HAS_WGMMA 0
#endif

namespace glm::cuda {

/* Describes a matrix of 128-byte rows in shared memory, at a multiple of 1,024 bytes: 16-byte chunk c of row r lies at chunk c ^ (r % 8)
 * of the row (128-byte swizzle), groups of 8 rows follow each other. The next k of the row is 2 further. */
__device__ __forceinline__ uint64_t swizzled_matrix(const void* shared) {
  constexpr uint64_t kGroupStride = 1024 >> 4;
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((shared_address(shared) & 0x3ffff) >> 4) | 1ull << 16 | kGroupStride << 32 |
         kSwizzle128 << 62;
}

/* Where chunk `chunk` (of 16 bytes) of row `row` lies in such a matrix. */
__device__ __forceinline__ int swizzled_offset(int row, int chunk) {
  return row * 128 + ((chunk ^ (row % 8)) << 4);
}

/* Orders accesses of registers, and of shared memory by this thread, before the multiplies that follow. */
__device__ __forceinline__ void wgmma_fence() {
#if GLM_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#if GLM_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/* Until at most kPending committed groups still run. */
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#if GLM_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

/* Makes what ordinary and cp.async writes put into shared memory visible to wgmma. */
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Starts d = a b, plus d if `add`. T: fp8 or bf16. */
template <typename T, int N>
struct Wgmma;

#define GLM_WGMMA(T, N, SHAPE, REGS, A, B, P, TAIL, ...)                                                           \
  template <>                                                                                                      \
  struct Wgmma<T, N> {                                                                                             \
    static __device__ __forceinline__ void start(float* d, uint64_t a, uint64_t b, bool add) {                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned." SHAPE " {" REGS "}, " A \
                   ", " B ", p, 1, 1" TAIL ";}"                                                                    \
                   : __VA_ARGS__                                                                                   \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                  \
    }                                                                                                              \
  };

#define GLM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GLM_D16(i) GLM_D4(i), GLM_D4(i + 4), GLM_D4(i + 8), GLM_D4(i + 12)
#define GLM_R0_15 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define GLM_R16_31 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define GLM_R32_47 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define GLM_R48_63 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#if GLM_HAS_WGMMA
GLM_WGMMA(fp8, 8, "m64n8k32.f32.e4m3.e4m3", "%0,%1,%2,%3", "%4", "%5", "%6", "", GLM_D4(0))
GLM_WGMMA(fp8, 16, "m64n16k32.f32.e4m3.e4m3", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", "", GLM_D4(0), GLM_D4(4))
GLM_WGMMA(fp8, 32, "m64n32k32.f32.e4m3.e4m3", GLM_R0_15, "%16", "%17", "%18", "", GLM_D16(0))
GLM_WGMMA(fp8, 64, "m64n64k32.f32.e4m3.e4m3", GLM_R0_15 "," GLM_R16_31, "%32", "%33", "%34", "", GLM_D16(0),
          GLM_D16(16))
GLM_WGMMA(fp8, 96, "m64n96k32.f32.e4m3.e4m3", GLM_R0_15 "," GLM_R16_31 "," GLM_R32_47, "%48", "%49", "%50", "",
          GLM_D16(0), GLM_D16(16), GLM_D16(32))
GLM_WGMMA(fp8, 128, "m64n128k32.f32.e4m3.e4m3", GLM_R0_15 "," GLM_R16_31 "," GLM_R32_47 "," GLM_R48_63, "%64", "%65",
          "%66", "", GLM_D16(0), GLM_D16(16), GLM_D16(32), GLM_D16(48))
GLM_WGMMA(bf16, 8, "m64n8k16.f32.bf16.bf16", "%0,%1,%2,%3", "%4", "%5", "%6", ", 0, 0", GLM_D4(0))
GLM_WGMMA(bf16, 16, "m64n16k16.f32.bf16.bf16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", ", 0, 0", GLM_D4(0),
          GLM_D4(4))
GLM_WGMMA(bf16, 32, "m64n32k16.f32.bf16.bf16", GLM_R0_15, "%16", "%17", "%18", ", 0, 0", GLM_D16(0))
GLM_WGMMA(bf16, 64, "m64n64k16.f32.bf16.bf16", GLM_R0_15 "," GLM_R16_31, "%32", "%33", "%34", ", 0, 0", GLM_D16(0),
          GLM_D16(16))
GLM_WGMMA(bf16, 128, "m64n128k16.f32.bf16.bf16", GLM_R0_15 "," GLM_R16_31 "," GLM_R32_47 "," GLM_R48_63, "%64", "%65",
          "%66", ", 0, 0", GLM_D16(0), GLM_D16(16), GLM_D16(32), GLM_D16(48))

/* The same with the 64 rows in registers (hold_weights, wide_tile.cuh), FP8. */
template <int N>
struct HeldWgmma;

#define GLM_HELD_WGMMA(N, SHAPE, REGS, A0, A1, A2, A3, B, P, ...)                                                    \
  template <>                                                                                                        \
  struct HeldWgmma<N> {                                                                                              \
    static __device__ __forceinline__ void start(float* d, const uint32_t* a, uint64_t b, bool add) {                \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned." SHAPE " {" REGS "}, {" A0 \
                   "," A1 "," A2 "," A3 "}, " B ", p, 1, 1;}"                                                        \
                   : __VA_ARGS__                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                \
    }                                                                                                                \
  };

GLM_HELD_WGMMA(32, "m64n32k32.f32.e4m3.e4m3", GLM_R0_15, "%16", "%17", "%18", "%19", "%20", "%21", GLM_D16(0))
GLM_HELD_WGMMA(64, "m64n64k32.f32.e4m3.e4m3", GLM_R0_15 "," GLM_R16_31, "%32", "%33", "%34", "%35", "%36", "%37",
               GLM_D16(0), GLM_D16(16))
GLM_HELD_WGMMA(96, "m64n96k32.f32.e4m3.e4m3", GLM_R0_15 "," GLM_R16_31 "," GLM_R32_47, "%48", "%49", "%50", "%51",
               "%52", "%53", GLM_D16(0), GLM_D16(16), GLM_D16(32))
GLM_HELD_WGMMA(128, "m64n128k32.f32.e4m3.e4m3", GLM_R0_15 "," GLM_R16_31 "," GLM_R32_47 "," GLM_R48_63, "%64", "%65",
               "%66", "%67", "%68", "%69", GLM_D16(0), GLM_D16(16), GLM_D16(32), GLM_D16(48))
#undef GLM_HELD_WGMMA
#else
template <int N>
struct HeldWgmma {
  static __device__ __forceinline__ void start(float*, const uint32_t*, uint64_t, bool) {}
};
template <typename T, int N>
struct Wgmma {
  static __device__ __forceinline__ void start(float*, uint64_t, uint64_t, bool) {}
};
#endif

#undef GLM_WGMMA
#undef GLM_D4
#undef GLM_D16
#undef GLM_R0_15
#undef GLM_R16_31
#undef GLM_R32_47
#undef GLM_R48_63

}  // namespace glm::cuda

#endif
