/* The matrix kernel of linear and expert layers: a block multiplies a tile of 32 * kWarpsN output channels by up to 8 * kTokenTiles tokens.
 *
 * Made for decode, where each weight byte is used once: a thread copies just the weights that it will multiply, several steps ahead, into a
 * queue of its own in shared memory, so they need no barrier; the tokens, which every warp of the tile needs, are staged there too.
 * (Registers would do as a queue, but the compiler tracks the loads of all of its places with one scoreboard and so
 * waits for the newest with the oldest.) A step is 128 bytes of K. Warps split a block's steps kWarpsK ways, blocks of a
 * cluster split the K dimension.
 *
 * The order of every sum follows from the shape (K and the split) alone, never from the number of tokens: rows keep their bits.
 * FP8 is unpacked to f16, which holds it exactly, and multiplied there: Hopper's mma.sync has no FP8 path of its own. */
#ifndef GLM_CUDA_STREAM_TILE_CUH
#define GLM_CUDA_STREAM_TILE_CUH

#include <type_traits>

#include "kernel.cuh"
#include "mma.cuh"

namespace glm::cuda {

constexpr int kStepBytes = 128;
constexpr int kWarpsK = 2;
constexpr int kRowTiles = 2; /* mma tiles of 16 channels a warp */
constexpr int kStageBytes = kWarpsK * kStepBytes;
constexpr int kStagePitch = kStageBytes + 64; /* rows g and g + 1 fall into different halves of the banks */

template <int kWarpsN>
constexpr int kTileChannels = 16 * kRowTiles * kWarpsN;
template <int kWarpsN>
constexpr int kTileThreads = kWarp * kWarpsN * kWarpsK;
template <int kWarpsN>
constexpr int kPartialPitch = kTileChannels<kWarpsN> + 4; /* lanes of an mma tile fall into 32 banks */

/* Turns of the loop whose operands are on their way or in use; two blocks of narrow tiles fit on a multiprocessor. */
template <int kWarpsN>
__host__ __device__ constexpr int stages_of(int token_tiles) {
  if (kWarpsN > 2) return 3;
  return token_tiles == 1 ? 6 : token_tiles == 2 ? 5 : token_tiles == 4 ? 4 : 3;
}
template <int kWarpsN>
constexpr int kWeightStageBytes = kTileChannels<kWarpsN> * kStageBytes;
__host__ __device__ constexpr int token_stage_bytes(int token_tiles) {
  return token_tiles * 8 * kStagePitch;
}

/* Shared memory of a tile: the stages of weights, those of tokens; later the partial sums [token][channel]. */
template <int kWarpsN>
constexpr size_t tile_shared_bytes(int token_tiles) {
  const size_t stages = static_cast<size_t>(stages_of<kWarpsN>(token_tiles)) *
                        (kWeightStageBytes<kWarpsN> + token_stage_bytes(token_tiles));
  const size_t partials = sizeof(float) * token_tiles * 8 * kPartialPitch<kWarpsN>;
  return stages > partials ? stages : partials;
}

enum class Operand { kBf16, kFp8Channel, kFp8Block };

/* The steps [first, last) of K that one block sums. */
struct StepRange {
  int first;
  int last;
};

/* What a tile reads. Weight rows are this thread's: channel group and group + 8 of its two mma tiles. */
struct TileInputs {
  const uint8_t* weights[2 * kRowTiles];
  const uint8_t* const* tokens; /* shared: one row a token; past the last any row, whose sums are not used */
  int k_bytes;
  StepRange steps;
  /* FP8_BLOCK only */
  const float* weight_scales[kRowTiles]; /* of the block row that the mma tile lies in, by step */
  const float* const* token_scales;      /* shared: by token, then by step */
};

/* 16 bytes of a row at `offset`, zeros past its end, wherever they lie. */
__device__ __forceinline__ uint4 load_bytes_16(const uint8_t* row, int offset, int k_bytes) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (offset + i < k_bytes) words[i / 4] |= static_cast<uint32_t>(row[offset + i]) << (8 * (i % 4));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/* A thread's weights of one step: [row][half of the step]. */
struct StepWeights {
  uint4 rows[2 * kRowTiles][2];
};

/* Starts the copies of this thread's weights of one step. `queue`: 16 bytes of each thread beside each other. */
template <int kThreads, bool kAligned>
__device__ __forceinline__ void copy_weights(uint4* queue, const TileInputs& in, int step) {
  if (step >= in.steps.last) return;
  const int offset = step * kStepBytes + static_cast<int>(threadIdx.x % 4) * 16;
  const bool whole = kAligned && (step + 1) * kStepBytes <= in.k_bytes;
#pragma unroll
  for (int i = 0; i < 4 * kRowTiles; ++i) {
    uint4* to = queue + i * kThreads + threadIdx.x;
    const int at = offset + i % 2 * 64;
    if (whole) {
      copy_async_16(to, in.weights[i / 2] + at);
    } else if constexpr (kAligned) {
      copy_async_16(to, in.weights[i / 2] + at, at < in.k_bytes);
    } else {
      *to = load_bytes_16(in.weights[i / 2], at, in.k_bytes);
    }
  }
}

template <int kThreads>
__device__ __forceinline__ StepWeights read_weights(const uint4* queue) {
  StepWeights weights;
#pragma unroll
  for (int i = 0; i < 4 * kRowTiles; ++i) weights.rows[i / 2][i % 2] = queue[i * kThreads + threadIdx.x];
  return weights;
}

/* Starts the copy of one stage of tokens: kWarpsK steps from `step` on. A thread copies the same columns of several tokens. */
template <int kTokenTiles, int kThreads, bool kAligned>
__device__ __forceinline__ void stage_tokens(uint8_t* stage, const TileInputs& in, int step) {
  if (step >= in.steps.last) return;
  constexpr int kChunks = kStageBytes / 16;
  constexpr int kRowsPerTurn = kThreads / kChunks;
  const int row = static_cast<int>(threadIdx.x) / kChunks;
  const int column = static_cast<int>(threadIdx.x) % kChunks * 16;
  const int offset = step * kStepBytes + column;
  uint8_t* to = stage + row * kStagePitch + column;
  const bool whole = kAligned && (step + kWarpsK) * kStepBytes <= in.k_bytes;
#pragma unroll
  for (int first = 0; first < kTokenTiles * 8; first += kRowsPerTurn, to += kRowsPerTurn * kStagePitch) {
    if (kRowsPerTurn > kTokenTiles * 8 && row >= kTokenTiles * 8) break;
    const uint8_t* from = in.tokens[first + row] + offset;
    if (whole) {
      copy_async_16(to, from);
    } else if constexpr (kAligned) {
      copy_async_16(to, from, offset < in.k_bytes);
    } else {
      *reinterpret_cast<uint4*>(to) = load_bytes_16(in.tokens[first + row], offset, in.k_bytes);
    }
  }
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* Half a step (64 bytes of K): the same bytes of a row and of a token meet in one lane, so which K they are does not matter. */
template <Operand kOperand, int kTokenTiles>
__device__ __forceinline__ void multiply_half(float sums[kRowTiles][kTokenTiles][4], const StepWeights& weights,
                                              int half, const uint8_t* tokens) {
  constexpr bool kFp8 = kOperand != Operand::kBf16;
  constexpr int kMmas = kFp8 ? 4 : 2;
  uint32_t a[kRowTiles][kMmas][4];
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    const uint4& low = weights.rows[2 * tile][half];
    const uint4& high = weights.rows[2 * tile + 1][half];
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
      if constexpr (kFp8) {
        a[tile][i][0] = low_fp8_to_f16x2(word(low, i));
        a[tile][i][1] = low_fp8_to_f16x2(word(high, i));
        a[tile][i][2] = high_fp8_to_f16x2(word(low, i));
        a[tile][i][3] = high_fp8_to_f16x2(word(high, i));
      } else {
        a[tile][i][0] = word(low, 2 * i);
        a[tile][i][1] = word(high, 2 * i);
        a[tile][i][2] = word(low, 2 * i + 1);
        a[tile][i][3] = word(high, 2 * i + 1);
      }
    }
  }
  /* Several token tiles at a time, so that an accumulator's next use is some instructions away. */
  constexpr int kGroup = kTokenTiles < 4 ? kTokenTiles : 4;
#pragma unroll
  for (int first = 0; first < kTokenTiles; first += kGroup) {
    uint4 b[kGroup];
#pragma unroll
    for (int n = 0; n < kGroup; ++n) {
      b[n] = *reinterpret_cast<const uint4*>(tokens + (first + n) * 8 * kStagePitch);
    }
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
#pragma unroll
      for (int n = 0; n < kGroup; ++n) {
        const uint32_t b0 = kFp8 ? low_fp8_to_f16x2(word(b[n], i)) : word(b[n], 2 * i % 4);
        const uint32_t b1 = kFp8 ? high_fp8_to_f16x2(word(b[n], i)) : word(b[n], (2 * i + 1) % 4);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          mma_16x8x16<std::conditional_t<kFp8, f16, bf16>>(sums[tile][first + n], a[tile][i], b0, b1);
        }
      }
    }
  }
}

/* One step. With FP8_BLOCK a step is one scale block: its sum is scaled before it is added. */
template <Operand kOperand, int kTokenTiles>
__device__ __forceinline__ void multiply_step(float sums[kRowTiles][kTokenTiles][4], const StepWeights& weights,
                                              const TileInputs& in, int step, const uint8_t* tokens) {
  if constexpr (kOperand != Operand::kFp8Block) {
    multiply_half<kOperand, kTokenTiles>(sums, weights, 0, tokens);
    multiply_half<kOperand, kTokenTiles>(sums, weights, 1, tokens + 64);
  } else {
    float block[kRowTiles][kTokenTiles][4] = {};
    multiply_half<kOperand, kTokenTiles>(block, weights, 0, tokens);
    multiply_half<kOperand, kTokenTiles>(block, weights, 1, tokens + 64);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float token_scale = in.token_scales[n * 8 + static_cast<int>(threadIdx.x % 4) * 2 + i][step];
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          const float weight_scale = in.weight_scales[tile][step];
          sums[tile][n][i] += block[tile][n][i] * token_scale * weight_scale;
          sums[tile][n][i + 2] += block[tile][n][i + 2] * token_scale * weight_scale;
        }
      }
    }
  }
}

/* Adds the warps that split K, in order, into partials[token][channel]. All stages must have been consumed. */
template <int kTokenTiles, int kWarpsN>
__device__ __forceinline__ void add_warps(const float sums[kRowTiles][kTokenTiles][4], float* partials) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
  const int channel = warp % kWarpsN * 16 * kRowTiles + group;
#pragma unroll
  for (int turn = 0; turn < kWarpsK; ++turn) {
    __syncthreads();
    if (warp / kWarpsN != turn) continue;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = n * 8 + member * 2 + i % 2;
          float& sum = partials[token * kPartialPitch<kWarpsN> + channel + tile * 16 + i / 2 * 8];
          sum = turn == 0 ? sums[tile][n][i] : sum + sums[tile][n][i];
        }
      }
    }
  }
  __syncthreads();
}

/* Sums over the block's steps into shared memory, partials[token][channel] with kPartialPitch. kAligned: rows start at and last for
 * multiples of 16 bytes. `before_tokens` runs once the first weights are on their way: it must make `in.tokens` and what it
 * points to readable by all threads. */
template <Operand kOperand, int kTokenTiles, int kWarpsN, bool kAligned, typename F>
__device__ __forceinline__ void stream_tile(const TileInputs& in, uint8_t* shared, F&& before_tokens) {
  constexpr int kThreads = kTileThreads<kWarpsN>;
  constexpr int kStages = stages_of<kWarpsN>(kTokenTiles);
  constexpr int kTokenBytes = token_stage_bytes(kTokenTiles);
  const int warp_k = static_cast<int>(threadIdx.x) / kWarp / kWarpsN;
  const int lane_offset =
      static_cast<int>(threadIdx.x) % kWarp / 4 * kStagePitch + static_cast<int>(threadIdx.x) % 4 * 16;
  const auto queue = [&](int stage) { return reinterpret_cast<uint4*>(shared + stage * kWeightStageBytes<kWarpsN>); };
  const auto tokens = [&](int stage) { return shared + kStages * kWeightStageBytes<kWarpsN> + stage * kTokenBytes; };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    copy_weights<kThreads, kAligned>(queue(i), in, in.steps.first + i * kWarpsK + warp_k);
  }
  before_tokens();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    stage_tokens<kTokenTiles, kThreads, kAligned>(tokens(i), in, in.steps.first + i * kWarpsK);
    commit_copies();
  }
  float sums[kRowTiles][kTokenTiles][4] = {};
  int stage = 0;
  for (int first = in.steps.first; first < in.steps.last; first += kWarpsK) {
    wait_copies<kStages - 2>();
    __syncthreads();
    const int ahead = first + (kStages - 1) * kWarpsK;
    const int next = stage == 0 ? kStages - 1 : stage - 1;
    copy_weights<kThreads, kAligned>(queue(next), in, ahead + warp_k);
    stage_tokens<kTokenTiles, kThreads, kAligned>(tokens(next), in, ahead);
    commit_copies();
    if (first + warp_k < in.steps.last) {
      const StepWeights weights = read_weights<kThreads>(queue(stage));
      multiply_step<kOperand, kTokenTiles>(sums, weights, in, first + warp_k,
                                           tokens(stage) + lane_offset + warp_k * kStepBytes);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  wait_copies<0>();
  add_warps<kTokenTiles, kWarpsN>(sums, reinterpret_cast<float*>(shared));
}

/* Eight neighbouring channels of one token's partial sums. */
struct ChannelSums {
  float values[8];
};

__device__ __forceinline__ ChannelSums load_sums(const float* from) {
  const float4 low = reinterpret_cast<const float4*>(from)[0];
  const float4 high = reinterpret_cast<const float4*>(from)[1];
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

}  // namespace glm::cuda

#endif
