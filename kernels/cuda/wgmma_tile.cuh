/* The matrix kernel of Hopper: 64 output channels times up to kTokens tokens on wgmma, FP8 or bf16.
 *
 * Of a block's eight warps four multiply, two copy weights and two copy tokens, each pair at its own pace, into a ring of stages; weights so
 * run ahead of the tokens that a predecessor still writes. A step is 128 bytes of K. Weights are the 64-row operand for any number of
 * tokens, so an output element is the same sequence of multiplies in a tile of any width and keeps its bits.
 *
 * FP8 tensor cores add with about 14 bits of mantissa: the sum of each step starts at zero and is added to the others in f32. */
#ifndef GLM_CUDA_WGMMA_TILE_CUH
#define GLM_CUDA_WGMMA_TILE_CUH

#include <type_traits>

#include "kernel.cuh"
#include "mbarrier.cuh"
#include "stream_tile.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace glm::cuda {

constexpr int kWarpgroup = 128;
constexpr int kWgmmaChannels = 64;
constexpr int kLoaderThreads = 64; /* of weights, and as many of tokens */
constexpr int kWgmmaThreads = kWarpgroup + 2 * kLoaderThreads;
constexpr int kWgmmaWeightBytes = kWgmmaChannels * kStepBytes;
constexpr int kSwizzleAlignment = 1024;
constexpr int kMultiplyBarrier = 1; /* named barrier of the multiplying warps */
constexpr int kWgmmaPitch = kWgmmaChannels + 4;

/* Two blocks fit on a multiprocessor. */
__host__ __device__ constexpr int wgmma_stages(int tokens) {
  return tokens <= 8 ? 10 : tokens <= 16 ? 9 : tokens <= 32 ? 8 : tokens <= 64 ? 6 : 4;
}
__host__ __device__ constexpr int wgmma_stage_bytes(int tokens) {
  return kWgmmaWeightBytes + tokens * kStepBytes;
}

enum class Role { kMultiply, kLoadWeights, kLoadTokens };

__device__ __forceinline__ Role role_of_warp() {
  if (threadIdx.x < kWarpgroup) return Role::kMultiply;
  return threadIdx.x < kWarpgroup + kLoaderThreads ? Role::kLoadWeights : Role::kLoadTokens;
}

/* Of a loader: the row of each group of eight rows that it copies, and its 16 bytes of a step. */
__device__ __forceinline__ int loader_row() {
  return static_cast<int>(threadIdx.x) % kLoaderThreads / 8;
}
__device__ __forceinline__ int loader_chunk() {
  return static_cast<int>(threadIdx.x) % 8;
}

/* What one loader copies of a matrix: row loader_row() of `groups` groups of eight. */
template <int kGroups>
struct LoaderRows {
  const uint8_t* rows[kGroups];
  int groups;
};

/* Copies one step of the loader's rows into a stage and arrives at its barrier. `aligned`: rows start at and last for multiples of 16 bytes. kStreamed: rows are read in
 * order and once. */
template <bool kStreamed, int kGroups>
__device__ __forceinline__ void load_step(const LoaderRows<kGroups>& from, int step, int k_bytes, bool aligned,
                                          uint8_t* to, uint64_t* full) {
  const int offset = step * kStepBytes + loader_chunk() * 16;
  to += swizzled_offset(loader_row(), loader_chunk());
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i >= from.groups) break;
      if (kStreamed) {
        copy_streamed_16(to + i * kSwizzleAlignment, from.rows[i] + offset, offset < k_bytes);
      } else {
        copy_async_16(to + i * kSwizzleAlignment, from.rows[i] + offset, offset < k_bytes);
      }
    }
    barrier_arrive_after_copies(full);
  } else {
    for (int i = 0; i < kGroups; ++i) {
      if (i < from.groups) {
        *reinterpret_cast<uint4*>(to + i * kSwizzleAlignment) = load_bytes_16(from.rows[i], offset, k_bytes);
      }
    }
    barrier_arrive(full);
  }
}

/* A block's ring of stages in shared memory: weights [64][128], then tokens [kTokens][128], both swizzled. */
template <int kTokens>
struct WgmmaPipe {
  static constexpr int kStages = wgmma_stages(kTokens);
  using Place = RingPlace<kStages>;
  Ring<kStages>* ring;
  uint8_t* stages;

  __device__ __forceinline__ uint8_t* weights(const Place& at) const {
    return stages + at.stage * wgmma_stage_bytes(kTokens);
  }
  __device__ __forceinline__ uint8_t* tokens(const Place& at) const { return weights(at) + kWgmmaWeightBytes; }

  /* By the whole block, before anything else. token_threads: that arrive for a stage's tokens. */
  __device__ __forceinline__ void init(int token_threads = kLoaderThreads) const {
    if (threadIdx.x == 0) ring->init(kLoaderThreads + token_threads, kWarpgroup / kWarp);
    __syncthreads();
  }

  template <int kGroups>
  __device__ __forceinline__ void load_weights(const LoaderRows<kGroups>& from, StepRange steps, int k_bytes,
                                               bool aligned, Place& at) const {
    for (int step = steps.first; step < steps.last; ++step, at.advance()) {
      ring->wait_empty(at);
      load_step<true>(from, step, k_bytes, aligned, weights(at), &ring->full[at.stage]);
    }
  }
  template <int kGroups>
  __device__ __forceinline__ void load_tokens(const LoaderRows<kGroups>& from, StepRange steps, int k_bytes,
                                              bool aligned, Place& at) const {
    for (int step = steps.first; step < steps.last; ++step, at.advance()) {
      ring->wait_empty(at);
      load_step<false>(from, step, k_bytes, aligned, tokens(at), &ring->full[at.stage]);
    }
  }
  /* Likewise by one thread, from row `first` of the map on, whose boxes have `rows` rows. */
  __device__ __forceinline__ void copy_tokens(const CUtensorMap* map, int first, int rows, StepRange steps,
                                              Place& at) const {
    for (int step = steps.first; step < steps.last; ++step, at.advance()) {
      ring->wait_empty(at);
      barrier_expect(&ring->full[at.stage], rows * kStepBytes);
      copy_box(tokens(at), map, step * kStepBytes, first, &ring->full[at.stage]);
    }
  }
};

/* Scales of FP8_BLOCK, by step. */
struct BlockScales {
  const float* weights[2];    /* of the thread's rows group and group + 8 */
  const float* const* tokens; /* shared: of each token of the tile */
};

/* The four multiplies of a step: 32 bytes of K each. */
template <Operand kOperand, int N>
__device__ __forceinline__ void start_step(float* sums, const uint8_t* weights, const uint8_t* tokens) {
  using T = std::conditional_t<kOperand == Operand::kBf16, bf16, fp8>;
  const uint64_t a = swizzled_matrix(weights);
  const uint64_t b = swizzled_matrix(tokens);
#pragma unroll
  for (int i = 0; i < 4; ++i) Wgmma<T, N>::start(sums, a + 2 * i, b + 2 * i, kOperand == Operand::kBf16 || i > 0);
}

/* Adds the sum of one step. */
template <Operand kOperand, int N>
__device__ __forceinline__ void promote(float* sums, const float* part, const BlockScales& scales, int step) {
  if constexpr (kOperand == Operand::kFp8Channel) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] += part[i];
  } else {
    const float weight[2] = {scales.weights[0][step], scales.weights[1][step]};
    const int member = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float token = scales.tokens[i / 4 * 8 + member * 2 + i % 2][step];
      sums[i] += part[i] * token * weight[i / 2 % 2];
    }
  }
}

/* Starts the multiplies of the stage, as one group. */
template <Operand kOperand, int N, int kTokens>
__device__ __forceinline__ void start_stage(float* sums, const WgmmaPipe<kTokens>& pipe,
                                            const typename WgmmaPipe<kTokens>::Place& at) {
  pipe.ring->wait_full(at);
  fence_async_proxy();
  wgmma_fence();
  start_step<kOperand, N>(sums, pipe.weights(at), pipe.tokens(at));
  wgmma_commit();
}

/* The end of a step that has been started, while kPending later ones run. */
template <Operand kOperand, int N, int kPending, int kTokens>
__device__ __forceinline__ void finish_stage(float* sums, const float* part, const WgmmaPipe<kTokens>& pipe,
                                             const BlockScales& scales, int step,
                                             typename WgmmaPipe<kTokens>::Place& at) {
  wgmma_wait<kPending>();
  if (threadIdx.x % kWarp == 0) barrier_arrive(&pipe.ring->empty[at.stage]);
  if constexpr (kOperand != Operand::kBf16) promote<kOperand, N>(sums, part, scales, step);
  at.advance();
}

/* By the multiplying warps: sums[N / 2] of the tile over `steps`, laid out as wgmma has them. A step runs while the one before it is added:
 * even steps in one set of registers, odd ones in another. (The compiler follows them through this loop only as it is written.) */
template <Operand kOperand, int N, int kTokens>
__device__ __forceinline__ void multiply_steps(float* sums, const WgmmaPipe<kTokens>& pipe, StepRange steps,
                                               const BlockScales& scales, typename WgmmaPipe<kTokens>::Place& at) {
  constexpr bool kExact = kOperand == Operand::kBf16; /* wgmma adds in f32 */
  float even_part[kExact ? 1 : N / 2];
  float odd_part[kExact ? 1 : N / 2];
  float* even = kExact ? sums : even_part;
  float* odd = kExact ? sums : odd_part;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[i] = 0.0f;
  if (steps.first >= steps.last) return;
  auto next = at;
  const auto start = [&](float* part) {
    start_stage<kOperand, N>(part, pipe, next);
    next.advance();
  };
  start(even);
  int step = steps.first;
  for (; step + 2 < steps.last; step += 2) {
    start(odd);
    finish_stage<kOperand, N, 1>(sums, even, pipe, scales, step, at);
    start(even);
    finish_stage<kOperand, N, 1>(sums, odd, pipe, scales, step + 1, at);
  }
  if (step + 1 < steps.last) {
    start(odd);
    finish_stage<kOperand, N, 1>(sums, even, pipe, scales, step, at);
    finish_stage<kOperand, N, 0>(sums, odd, pipe, scales, step + 1, at);
  } else {
    finish_stage<kOperand, N, 0>(sums, even, pipe, scales, step, at);
  }
}

/* The thread's sums into shared memory, partials[token][channel] with pitch kWgmmaPitch. */
template <int N>
__device__ __forceinline__ void store_partials(const float* sums, float* partials) {
  const int channel = static_cast<int>(threadIdx.x) / kWarp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    partials[(i / 4 * 8 + member * 2 + i % 2) * kWgmmaPitch + channel + i / 2 % 2 * 8] = sums[i];
  }
}

__device__ __forceinline__ uint8_t* swizzle_aligned(uint8_t* shared) {
  const uint32_t past = shared_address(shared) % kSwizzleAlignment;
  return past == 0 ? shared : shared + (kSwizzleAlignment - past);
}

}  // namespace glm::cuda

#endif
