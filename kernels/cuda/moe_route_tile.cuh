/* The router's tiles of many tokens: how a block's tokens and weights come to shared memory. Warps cut the weights of a few experts into bf16
 * parts, once for all tokens of the block. */
#ifndef GLM_CUDA_MOE_ROUTE_TILE_CUH
#define GLM_CUDA_MOE_ROUTE_TILE_CUH

#include <type_traits>

#include "moe_route_logits.cuh"
#include "wgmma_tile.cuh"

namespace glm::cuda {

constexpr int kStrides = 5;    /* steps of a bucket: of 5120 columns; fewer are filled with zeros */
constexpr int kBoxBuckets = 4; /* whose columns lie in a box of tokens, 128 bytes wide */
constexpr int kBoxColumns = kBoxBuckets * kRouteStep;
constexpr int kRankBoxes = kRouteWarps / kBoxBuckets; /* of a share of K, each `strides` times */
constexpr int kSlots = 2;                             /* each has the weights of a bucket */

/* A block: kGroups times 64 tokens by kExperts experts. kRanks: shares of K that it goes through, 1 or all. */
template <typename W, int kGroups, int kExperts, int kRanks>
struct WideRoute {
  using Weight = W;
  static constexpr int kExpertsOfBlock = kExperts;
  static constexpr int kRanksOfBlock = kRanks;
  static constexpr int kTokens = kGroups * 64;
  static constexpr int kMultiplyThreads = kGroups * kWarpgroup;
  static constexpr int kConverters = kGroups == 1 ? 2 : 1; /* sets of warps that fill slots by turns */
  static constexpr int kConvertWarps = kExperts / 8;       /* of a set */
  static constexpr int kThreads = kMultiplyThreads + (kConverters * kConvertWarps + 1) * kWarp;
  static constexpr int kPieces = std::is_same_v<W, bf16> ? 1 : 3;
  static constexpr int kPieceBytes = kExperts * kRouteStep * 2; /* of a step */
  static constexpr int kSlotBytes = kStrides * kPieces * kPieceBytes;
  static constexpr int kBoxBytes = kTokens * kBoxColumns * 2;
  static constexpr int kSums = kExperts / 2; /* of a multiplying thread */

  static int shared_bytes(int strides) { return kSwizzleAlignment + 2 * strides * kBoxBytes + kSlots * kSlotBytes; }
};

struct WideRouteParams {
  glm_weight weight;
  float* logits;
  int32_t rows;
  int32_t cols;
  int32_t strides;
  bool beside;
  CUtensorMap x;
};

/* A block's two rings: of boxes of tokens, and of slots. */
template <typename Shape>
struct RoutePipe {
  Ring<2>* token_ring;
  Ring<kSlots>* slot_ring;
  uint8_t* boxes; /* [2][strides][kTokens][128 bytes], swizzled */
  uint8_t* slots; /* [kSlots][kStrides][kPieces] */
  int strides;

  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      token_ring->init(1, Shape::kMultiplyThreads / kWarp);
      slot_ring->init(Shape::kConvertWarps, Shape::kMultiplyThreads / kWarp);
    }
    __syncthreads();
  }
  __device__ __forceinline__ uint8_t* box(int buffer, int stride) const {
    return boxes + (buffer * strides + stride) * Shape::kBoxBytes;
  }
  __device__ __forceinline__ uint8_t* slot(const RingPlace<kSlots>& at) const {
    return slots + at.stage * Shape::kSlotBytes;
  }
};

/* By one thread: all boxes of tokens. */
template <typename Shape>
__device__ __forceinline__ void copy_tokens(const WideRouteParams& p, const RoutePipe<Shape>& pipe, int first_token,
                                            int rank) {
  RingPlace<2> at;
  for (int i = rank * kRankBoxes; i < (rank + Shape::kRanksOfBlock) * kRankBoxes; ++i, at.advance()) {
    uint64_t* full = &pipe.token_ring->full[at.stage];
    pipe.token_ring->wait_empty(at);
    barrier_expect(full, p.strides * Shape::kBoxBytes);
    for (int stride = 0; stride < p.strides; ++stride) {
      copy_box(pipe.box(at.stage, stride), &p.x, (i * kBoxColumns + stride * kRouteStride) * 2, first_token, full);
    }
  }
}

/* Four weights, in the order that a lane of decode's multiplies them. */
__device__ __forceinline__ float4 read_weights(const float* from) {
  return __ldg(reinterpret_cast<const float4*>(from));
}
template <typename W>
__device__ __forceinline__ float4 read_weights(const W* from) {
  return make_float4(to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3]));
}

/* A converting thread's weights of a bucket: four of each step of one expert. */
template <typename Shape>
struct BucketWeights {
  using W = typename Shape::Weight;
  float4 weights[kStrides];

  /* `row` and `cols` from the thread's first column on. */
  __device__ __forceinline__ void read(const W* row, int cols, int bucket) {
#pragma unroll
    for (int i = 0; i < kStrides; ++i) {
      const int column = bucket * kRouteStep + i * kRouteStride;
      weights[i] = column < cols ? read_weights(row + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
};

template <typename Shape>
struct BucketParts {
  uint32_t words[kStrides][Shape::kPieces][2];

  __device__ __forceinline__ explicit BucketParts(const BucketWeights<Shape>& bucket) {
#pragma unroll
    for (int i = 0; i < kStrides; ++i) {
      float4 w = bucket.weights[i];
#pragma unroll
      for (int piece = 0; piece < Shape::kPieces; ++piece) {
        words[i][piece][0] = take_bf16(w.x, w.y);
        words[i][piece][1] = take_bf16(w.z, w.w);
      }
    }
  }
  __device__ __forceinline__ void store(uint8_t* slot, int thread) const {
    auto* to = reinterpret_cast<uint32_t*>(slot) + thread;
#pragma unroll
    for (int i = 0; i < kStrides * Shape::kPieces; ++i, to += Shape::kPieceBytes / 4) {
      to[0] = words[i / Shape::kPieces][i % Shape::kPieces][0];
      to[Shape::kPieceBytes / 8] = words[i / Shape::kPieces][i % Shape::kPieces][1];
    }
  }
};

/* By converting warps: of their set every kConverters-th bucket. Weights are no operation's output: the first are read before the predecessor
 * ends. */
template <typename Shape>
__device__ __forceinline__ void convert_weights(const WideRouteParams& p, const RoutePipe<Shape>& pipe,
                                                int first_expert, int rank) {
  constexpr int kSetThreads = Shape::kConvertWarps * kWarp;
  const int set = (static_cast<int>(threadIdx.x) - Shape::kMultiplyThreads) / kSetThreads;
  const int thread = (static_cast<int>(threadIdx.x) - Shape::kMultiplyThreads) % kSetThreads;
  const int expert = min(first_expert + thread / 4, p.weight.rows - 1);
  const int own = thread % 4 * 4;
  const auto* row = static_cast<const typename Shape::Weight*>(p.weight.data) + expert * p.weight.stride + own;
  const int last = (rank + Shape::kRanksOfBlock) * kRouteWarps;
  RingPlace<kSlots> at{set, 0};
  BucketWeights<Shape> weights;
  weights.read(row, p.cols - own, rank * kRouteWarps + set);
  for (int bucket = rank * kRouteWarps + set; bucket < last; bucket += Shape::kConverters) {
    const BucketParts<Shape> parts(weights);
    if (bucket + Shape::kConverters < last) weights.read(row, p.cols - own, bucket + Shape::kConverters);
    pipe.slot_ring->wait_empty(at);
    parts.store(pipe.slot(at), thread);
    fence_async_proxy();
    __syncwarp();
    if (thread % kWarp == 0) barrier_arrive(&pipe.slot_ring->full[at.stage]);
    for (int i = 0; i < Shape::kConverters; ++i) at.advance();
  }
}

}  // namespace glm::cuda

#endif
