/* The router's multiply on wgmma (sm_90a): 64 tokens, in registers, by a few experts, whose bf16 parts lie in shared memory. Sums are made in
 * decode's order (moe_route_logits.cuh): what a warp adds up there is a bucket here. */
#ifndef GLM_CUDA_MOE_ROUTE_MULTIPLY_CUH
#define GLM_CUDA_MOE_ROUTE_MULTIPLY_CUH

#include "moe_route_tile.cuh"

namespace glm::cuda {

/* A part of a step's weights: [2][kExperts][8 elements of K], so that eight experts' halves are a core matrix. */
template <int kExperts>
__device__ __forceinline__ uint64_t experts_matrix(const void* shared) {
  constexpr uint64_t kHalfStride = kExperts * 16 >> 4;
  constexpr uint64_t kGroupStride = 128 >> 4;
  return static_cast<uint64_t>((shared_address(shared) & 0x3ffff) >> 4) | kHalfStride << 16 | kGroupStride << 32;
}

/* Starts d[64 tokens][kExperts] = a b, plus d if `add`; as wgmma.cuh has them. */
template <int kExperts>
struct RouteWgmma;

#define GLM_ROUTE_WGMMA(N, SHAPE, REGS, A, B, P, ...)                                                 \
  template <>                                                                                         \
  struct RouteWgmma<N> {                                                                              \
    static __device__ __forceinline__ void start(float* d, const uint32_t* a, uint64_t b, bool add) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned." SHAPE      \
                   ".f32.bf16.bf16 {" REGS "}, {" A "}, " B ", p, 1, 1, 0;}"                          \
                   : __VA_ARGS__                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add))); \
    }                                                                                                 \
  };

#define GLM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GLM_D20 GLM_D4(0), GLM_D4(4), GLM_D4(8), GLM_D4(12), GLM_D4(16)
#define GLM_R0_19 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19"
#if GLM_HAS_WGMMA
GLM_ROUTE_WGMMA(40, "m64n40k16", GLM_R0_19, "%20,%21,%22,%23", "%24", "%25", GLM_D20)
GLM_ROUTE_WGMMA(56, "m64n56k16", GLM_R0_19 ",%20,%21,%22,%23,%24,%25,%26,%27", "%28,%29,%30,%31", "%32", "%33", GLM_D20,
                GLM_D4(20), GLM_D4(24))
#else
template <int kExperts>
struct RouteWgmma {
  static __device__ __forceinline__ void start(float*, const uint32_t*, uint64_t, bool) {}
};
#endif

#undef GLM_ROUTE_WGMMA
#undef GLM_D4
#undef GLM_D20
#undef GLM_R0_19

/* A multiplying thread's place among the tokens of a box. */
struct TokenReader {
  int row;    /* bytes */
  int member; /* of four lanes that read a row */
  int swizzle;

  __device__ __forceinline__ explicit TokenReader(int thread)
      : row((thread / kWarp * 16 + thread % kWarp / 4) * 128), member(thread % 4), swizzle(thread % kWarp / 4) {}

  __device__ __forceinline__ void read(const uint8_t* box, int bucket, uint32_t a[4]) const {
    const uint8_t* from = box + row + ((bucket * 2 + member / 2) ^ swizzle) * 16 + member % 2 * 8;
    const uint2 low = *reinterpret_cast<const uint2*>(from);
    const uint2 high = *reinterpret_cast<const uint2*>(from + 8 * 128);
    a[0] = low.x, a[1] = high.x, a[2] = low.y, a[3] = high.y;
  }
};

/* Starts the multiplies of a bucket, as one group. */
template <typename Shape>
__device__ __forceinline__ void start_bucket(float sums[Shape::kSums], const uint32_t tokens[kStrides][4],
                                             const uint8_t* slot) {
  constexpr int kExperts = Shape::kExpertsOfBlock;
  const uint64_t b = experts_matrix<kExperts>(slot);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStrides; ++i) {
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
      const int part = i * Shape::kPieces + piece;
      RouteWgmma<kExperts>::start(sums, tokens[i], b + part * (Shape::kPieceBytes / 16), part > 0);
    }
  }
  wgmma_commit();
}

/* Adds the sums of the buckets of two boxes, which lie in `buffer`, to the total of their share of K. */
template <typename Shape>
__device__ __forceinline__ void add_buckets(float total[Shape::kSums], const RoutePipe<Shape>& pipe, int buffer,
                                            const TokenReader& reader, RingPlace<kSlots>& at) {
  for (int bucket = 0; bucket < kBoxBuckets; ++bucket, at.advance()) {
    uint32_t tokens[kStrides][4];
#pragma unroll
    for (int i = 0; i < kStrides; ++i) {
      reader.read(pipe.box(buffer, min(i, pipe.strides - 1)), bucket, tokens[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) tokens[i][j] = i < pipe.strides ? tokens[i][j] : 0;
    }
    float sums[Shape::kSums];
    pipe.slot_ring->wait_full(at);
    start_bucket<Shape>(sums, tokens, pipe.slot(at));
    wgmma_wait<0>();
    if (threadIdx.x % kWarp == 0) barrier_arrive(&pipe.slot_ring->empty[at.stage]);
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) total[i] += sums[i];
  }
}

/* A multiplying thread's result: of a share of K the sum of its buckets, of several the sum of theirs. */
template <typename Shape>
__device__ __forceinline__ void multiply_shares(float result[Shape::kSums], const RoutePipe<Shape>& pipe) {
  const TokenReader reader(static_cast<int>(threadIdx.x));
  RingPlace<2> box_at;
  RingPlace<kSlots> at;
#pragma unroll
  for (int i = 0; i < Shape::kSums; ++i) result[i] = 0.0f;
  for (int rank = 0; rank < Shape::kRanksOfBlock; ++rank) {
    float total[Shape::kSums];
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) total[i] = 0.0f;
    for (int box = 0; box < kRankBoxes; ++box, box_at.advance()) {
      pipe.token_ring->wait_full(box_at);
      add_buckets<Shape>(total, pipe, box_at.stage, reader, at);
      if (threadIdx.x % kWarp == 0) barrier_arrive(&pipe.token_ring->empty[box_at.stage]);
    }
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) result[i] += total[i];
  }
}

}  // namespace glm::cuda

#endif
