/* The matrix kernel of prefill on Hopper, FP8: 128 output channels times kChunks * 128 tokens.
 *
 * One thread copies by TMA into a ring of stages. Two warpgroups multiply 64 channels each, a chunk of 128 tokens after another: while one adds a
 * chunk's sums in f32, the other's multiplies run. Three more warps store what they staged, beside the multiplies of the next tile. The two
 * blocks of a cluster take neighbouring channels of the same tokens: each copies half of the tokens to both. The sequence of multiplies and
 * additions of an output is that of wgmma_tile.cuh, so are its bits; where decode splits K over a cluster, the segments are summed
 * apart here too. */
#ifndef GLM_CUDA_WIDE_TILE_CUH
#define GLM_CUDA_WIDE_TILE_CUH

#include "kernel.cuh"
#include "tma.cuh"
#include "wgmma_tile.cuh"

namespace glm::cuda {

constexpr int kWideGroups = 2; /* multiplying warpgroups */
constexpr int kWideThreads = (kWideGroups + 1) * kWarpgroup;
constexpr int kWideChannels = kWideGroups * kWgmmaChannels;
constexpr int kWideCluster = 2; /* blocks */
constexpr int kMultiplyThreads = kWideGroups * kWarpgroup;
constexpr int kStoreThreads = 96;
constexpr int kChunkTokens = 128;
constexpr int kChunkBytes = kChunkTokens * kStepBytes;
constexpr int kStagedBytes = kChunkTokens * kWideChannels * 2; /* a chunk of bf16 outputs */
/* Named barriers: of the multiplying warps; that a buffer of staged outputs has room, and that it is full (one for each buffer). */
constexpr int kWideBarrier = 1;
constexpr int kRoomBarrier = 2;
constexpr int kStagedBarrier = 4;
constexpr int kMultiplyRegisters = 232;
constexpr int kCopyRegisters = 40;

__host__ __device__ constexpr int wide_stages(int chunks) {
  return chunks == 1 ? 6 : 3;
}
__host__ __device__ constexpr int wide_stage_bytes(int chunks) {
  return kWideChannels * kStepBytes + chunks * kChunkBytes;
}
/* The stages, then a buffer of staged outputs for each chunk: [warpgroup][token][64 channels]. */
__host__ __device__ constexpr int wide_shared_bytes(int chunks) {
  return kSwizzleAlignment + wide_stages(chunks) * wide_stage_bytes(chunks) + chunks * kStagedBytes;
}

enum class WideRole { kMultiply, kCopy, kStore, kNone };

__device__ __forceinline__ WideRole wide_role() {
  const int thread = static_cast<int>(threadIdx.x) - kMultiplyThreads;
  if (thread < 0) return WideRole::kMultiply;
  if (thread < kWarp) return thread == 0 ? WideRole::kCopy : WideRole::kNone;
  return WideRole::kStore;
}

/* Between the warps that stage outputs and those that store them. */
__device__ __forceinline__ void wait_for_room(int buffer) {
  named_barrier(kRoomBarrier + buffer, kMultiplyThreads + kStoreThreads);
}
__device__ __forceinline__ void give_room(int buffer) {
  named_barrier_arrive(kRoomBarrier + buffer, kMultiplyThreads + kStoreThreads);
}
__device__ __forceinline__ void hand_over(int buffer) {
  named_barrier_arrive(kStagedBarrier + buffer, kMultiplyThreads + kStoreThreads);
}
__device__ __forceinline__ void wait_for_staged(int buffer) {
  named_barrier(kStagedBarrier + buffer, kMultiplyThreads + kStoreThreads);
}

template <int kChunks>
struct WidePipe {
  static constexpr int kStages = wide_stages(kChunks);
  /* Rows that one block copies of a tile's tokens. */
  static constexpr int kTokenBox = kChunks * kChunkTokens / kWideCluster;
  using Place = RingPlace<kStages>;
  Ring<kStages>* ring;
  uint8_t* stages;

  __device__ __forceinline__ uint8_t* weights(const Place& at) const {
    return stages + at.stage * wide_stage_bytes(kChunks);
  }
  __device__ __forceinline__ uint8_t* tokens(const Place& at) const { return weights(at) + kWideChannels * kStepBytes; }
  /* Staged outputs of a warpgroup. */
  __device__ __forceinline__ uint8_t* outputs(int buffer, int group) const {
    return stages + kStages * wide_stage_bytes(kChunks) + buffer * kStagedBytes + group * (kStagedBytes / kWideGroups);
  }

  /* By every thread of the cluster: a stage is filled by one thread's arrival and bytes, emptied by all warps of both blocks. */
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) ring->init(1, kWideCluster * kMultiplyThreads / kWarp);
    cluster_sync();
  }

  /* By the thread that loads, before the first tile: its first weights. Returns the steps that they are. */
  template <typename F>
  __device__ __forceinline__ int load_ahead(F&& copy_weights, int chunks, int steps) const {
    const int ahead = min(kStages, steps);
    Place at;
    for (int step = 0; step < ahead; ++step, at.advance()) {
      barrier_expect(&ring->full[at.stage], kWideChannels * kStepBytes + chunks * kChunkBytes);
      copy_weights(weights(at), step * kStepBytes, &ring->full[at.stage]);
    }
    return ahead;
  }

  /* By one thread: all steps of the tile whose tokens start at row `token` of the map, `chunks` chunks of them. copy_weights(stage, column,
   * barrier) copies a step's weights; those of the first `ahead` steps are on their way. */
  template <typename F>
  __device__ __forceinline__ void load(F&& copy_weights, const CUtensorMap* token_map, int token, int chunks, int steps,
                                       Place& at, int ahead = 0) const {
    constexpr uint16_t kBoth = (1 << kWideCluster) - 1;
    const int first = static_cast<int>(cluster_rank()) * kTokenBox;
    for (int step = 0; step < steps; ++step, at.advance()) {
      uint64_t* full = &ring->full[at.stage];
      if (step >= ahead) {
        ring->wait_empty(at);
        barrier_expect(full, kWideChannels * kStepBytes + chunks * kChunkBytes);
        copy_weights(weights(at), step * kStepBytes, full);
      }
      if (first < chunks * kChunkTokens) {
        copy_box(tokens(at) + first * kStepBytes, token_map, step * kStepBytes, token + first, full, kBoth);
      }
    }
  }

  /* By a multiplying warp that is done with the stage. */
  __device__ __forceinline__ void release(const Place& at) const {
    const uint32_t lane = threadIdx.x % kWarp;
    if (lane < kWideCluster) barrier_arrive_at(&ring->empty[at.stage], lane);
  }
};

/* A warpgroup's weights of a step, in registers: shared memory is then read once for them and not once a chunk. */
struct HeldWeights {
  uint32_t words[kStepBytes / 32][4];
};

__device__ __forceinline__ HeldWeights hold_weights(const uint8_t* weights) {
  const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  HeldWeights held;
#pragma unroll
  for (int i = 0; i < kStepBytes / 32; ++i) {
    load_matrices(held.words[i], weights + swizzled_offset(warp * 16 + lane % 16, i * 2 + lane / 16));
  }
  return held;
}

/* Starts one step of one chunk, N tokens wide. */
template <int N>
__device__ __forceinline__ void start_chunk(float* part, const uint8_t* weights, const uint8_t* tokens) {
  start_step<Operand::kFp8Channel, N>(part, weights, tokens);
}
template <int N>
__device__ __forceinline__ void start_chunk(float* part, const HeldWeights& weights, const uint8_t* tokens) {
  const uint64_t b = swizzled_matrix(tokens);
#pragma unroll
  for (int i = 0; i < kStepBytes / 32; ++i) HeldWgmma<N>::start(part, weights.words[i], b + 2 * i, i > 0);
}

/* Adds that step to the sums. */
template <int N, typename Weights>
__device__ __forceinline__ void multiply_chunk(float* sums, const Weights& weights, const uint8_t* tokens) {
  float part[N / 2];
  wgmma_fence();
  start_chunk<N>(part, weights, tokens);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[i] += part[i];
}

/* Likewise for `count` tokens, as narrow as they allow. */
__device__ __forceinline__ void multiply_ragged_chunk(float* sums, const HeldWeights& weights, const uint8_t* tokens,
                                                      int count) {
  if (count > kChunkTokens * 3 / 4) {
    multiply_chunk<kChunkTokens>(sums, weights, tokens);
  } else if (count > kChunkTokens / 2) {
    multiply_chunk<kChunkTokens * 3 / 4>(sums, weights, tokens);
  } else if (count > kChunkTokens / 4) {
    multiply_chunk<kChunkTokens / 2>(sums, weights, tokens);
  } else if (count > 0) {
    multiply_chunk<kChunkTokens / 4>(sums, weights, tokens);
  }
}

template <int kChunks>
using WideSums = float[kChunks][kChunkTokens / 2];

template <int kChunks>
__device__ __forceinline__ void clear(WideSums<kChunks>& sums) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < kChunkTokens / 2; ++i) sums[chunk][i] = 0.0f;
  }
}

/* By a multiplying warpgroup: the sums of its 64 channels. kSegmented: a new sum starts every steps_per_segment steps, and they are added
 * in order. */
template <bool kSegmented, int kChunks>
__device__ __forceinline__ void multiply_wide(WideSums<kChunks>& sums, const WidePipe<kChunks>& pipe, int steps,
                                              int steps_per_segment, typename WidePipe<kChunks>::Place& at) {
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  WideSums<kSegmented ? kChunks : 1> totals;
  clear<kSegmented ? kChunks : 1>(totals);
  clear<kChunks>(sums);
  int left = steps_per_segment;
  for (int step = 0; step < steps; ++step, at.advance()) {
    if (kSegmented && left == 0) {
#pragma unroll
      for (int i = 0; i < kChunkTokens / 2; ++i) totals[0][i] += sums[0][i];
      clear<kChunks>(sums);
      left = steps_per_segment;
    }
    --left;
    pipe.ring->wait_full(at);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      multiply_chunk<kChunkTokens>(sums[chunk], pipe.weights(at) + group * kWgmmaWeightBytes,
                                   pipe.tokens(at) + chunk * kChunkBytes);
    }
    pipe.release(at);
  }
  if constexpr (kSegmented) {
#pragma unroll
    for (int i = 0; i < kChunkTokens / 2; ++i) sums[0][i] = totals[0][i] + sums[0][i];
  }
}

/* Likewise, unsegmented, for a tile of `count` tokens. */
template <int kChunks>
__device__ __forceinline__ void multiply_ragged(WideSums<kChunks>& sums, const WidePipe<kChunks>& pipe, int count,
                                                int steps, typename WidePipe<kChunks>::Place& at) {
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  clear<kChunks>(sums);
  for (int step = 0; step < steps; ++step, at.advance()) {
    pipe.ring->wait_full(at);
    const HeldWeights weights = hold_weights(pipe.weights(at) + group * kWgmmaWeightBytes);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      multiply_ragged_chunk(sums[chunk], weights, pipe.tokens(at) + chunk * kChunkBytes, count - chunk * kChunkTokens);
    }
    pipe.release(at);
  }
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/* By a warpgroup: a chunk's outputs value(sum, token, row) to `staged`, [token][64 channels], swizzled. row: 0 for the thread's row group,
 * 1 for group + 8. */
template <typename F>
__device__ __forceinline__ void stage_chunk(const float* sums, uint8_t* staged, F&& value) {
  const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int chunk = warp * 2 + lane / 8 % 2; /* of 8 channels */
#pragma unroll
  for (int i = 0; i < kChunkTokens / 8; i += 2) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = (i + j / 2) * 4 + j % 2 * 2;
      const int token = (i + j / 2) * 8 + lane % 4 * 2;
      packed[j] = pack_bf16(value(sums[at], token, j % 2), value(sums[at + 1], token + 1, j % 2));
    }
    const int row = (i + lane / 16) * 8 + lane % 8;
    store_matrices_transposed(staged + swizzled_offset(row, chunk), packed[0], packed[1], packed[2], packed[3]);
  }
}

}  // namespace glm::cuda

#endif
