/* What the two expert layers share: which tokens a block multiplies, the tensor-core tile over them, and the f32 path. */
#ifndef GLM_CUDA_EXPERTS_CUH
#define GLM_CUDA_EXPERTS_CUH

#include <algorithm>

#include "dot.cuh"
#include "exchange.h"
#include "launch.h"
#include "row.cuh"
#include "stream_tile.cuh"

namespace glm::cuda {

constexpr int kExpertWarpsN = 2;
constexpr int kExpertChannels = kTileChannels<kExpertWarpsN>;
constexpr int kExpertThreads = kTileThreads<kExpertWarpsN>;
constexpr int kExpertTokenTiles = 8;
constexpr int kExpertTokens = kExpertTokenTiles * 8;
constexpr size_t kExpertSharedBytes =
    std::max({tile_shared_bytes<kExpertWarpsN>(1), tile_shared_bytes<kExpertWarpsN>(2),
              tile_shared_bytes<kExpertWarpsN>(4), tile_shared_bytes<kExpertWarpsN>(kExpertTokenTiles)});
/* Blocks along an expert's tokens; each takes every kTokenBlocks-th tile. */
constexpr int kTokenBlocks = 8;

/* The assignments of one expert, and where their rows lie. */
struct ExpertInputs {
  glm_tensor x;
  glm_tensor x_scale;
  const int32_t* offsets;
  const int32_t* order;
  int32_t top_k;
  bool x_by_token; /* row of x: the assignment's token, or the assignment itself */
};

__device__ __forceinline__ int64_t x_row(const ExpertInputs& in, int32_t assignment) {
  return in.x_by_token ? assignment / in.top_k : assignment;
}

/* Whose y takes the products of down: this rank's, or that of the rank that has their token to itself. */
struct ProductRanks {
  const uint64_t* y = nullptr; /* on the device: its address on each rank; NULL: this rank's */
  uint32_t rows = 0;           /* tokens */
  uint32_t num_ranks = 1;
};

template <typename Act>
__device__ __forceinline__ Act* product_row(const glm_tensor& y, const ProductRanks& ranks, int32_t top_k,
                                            int32_t assignment) {
  if (ranks.y == nullptr) return row_of<Act>(y, assignment);
  const uint32_t token = static_cast<uint32_t>(assignment) / static_cast<uint32_t>(top_k);
  return reinterpret_cast<Act*>(ranks.y[owner_of(token, ranks.rows, ranks.num_ranks)]) + int64_t{assignment} * y.stride;
}

inline int64_t token_blocks(int64_t rows, int64_t tokens_per_tile) {
  const int64_t tiles = (rows + tokens_per_tile - 1) / tokens_per_tile;
  return tiles < kTokenBlocks ? tiles : kTokenBlocks;
}

/* Shared tables of a tile's tokens. */
struct ExpertTokens {
  const uint8_t* data[kExpertTokens];
  const float* scales[kExpertTokens];
  float row_scales[kExpertTokens];
  int32_t assignments[kExpertTokens];
};

/* Fills the tables with the assignments [first, first + count) of the order; the rest repeats the last. */
template <Operand kOperand>
__device__ __forceinline__ void find_expert_tokens(const ExpertInputs& in, int first, int count, ExpertTokens& tokens) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  const int i = static_cast<int>(threadIdx.x);
  if (i < kExpertTokens) {
    const int32_t assignment = in.order[first + min(i, count - 1)];
    const int64_t row = x_row(in, assignment);
    tokens.assignments[i] = assignment;
    tokens.data[i] = static_cast<const uint8_t*>(in.x.data) + row * in.x.stride * kElement;
    tokens.scales[i] = kOperand == Operand::kBf16 ? nullptr : row_of<float>(in.x_scale, row);
    tokens.row_scales[i] = kOperand == Operand::kFp8Channel ? *tokens.scales[i] : 1.0f;
  }
  __syncthreads();
}

__host__ __device__ __forceinline__ bool is_aligned_16(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

/* Tokens of one tile: eight, where bytes have to be gathered one by one. */
__device__ __forceinline__ int tile_tokens(bool aligned) {
  return aligned ? kExpertTokens : 8;
}

/* Sums of one tile into shared memory: as narrow in tokens as `count` allows, for the same bits. `find_tokens` fills the tables that
 * `in` points at, once the first weights are on their way. */
template <Operand kOperand, typename F>
__device__ __forceinline__ void multiply_expert_tile(const TileInputs& in, bool aligned, int count, uint8_t* shared,
                                                     F&& find_tokens) {
  if (!aligned) {
    stream_tile<kOperand, 1, kExpertWarpsN, false>(in, shared, find_tokens);
  } else if (count <= 8) {
    stream_tile<kOperand, 1, kExpertWarpsN, true>(in, shared, find_tokens);
  } else if (count <= 16) {
    stream_tile<kOperand, 2, kExpertWarpsN, true>(in, shared, find_tokens);
  } else if (count <= 32) {
    stream_tile<kOperand, 4, kExpertWarpsN, true>(in, shared, find_tokens);
  } else {
    stream_tile<kOperand, kExpertTokenTiles, kExpertWarpsN, true>(in, shared, find_tokens);
  }
}

/* Points the tile at row `row` (clamped to the weight) for its `i`-th row of this thread. */
template <Operand kOperand>
__device__ __forceinline__ void set_weight_row(const glm_weight& weight, int64_t row, int i, TileInputs& in) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  const int64_t clamped = row < weight.rows ? row : weight.rows - 1;
  in.weights[i] = static_cast<const uint8_t*>(weight.data) + clamped * weight.stride * kElement;
  if (kOperand == Operand::kFp8Block && i % 2 == 0) {
    in.weight_scales[i / 2] = weight.scale + clamped / GLM_FP8_BLOCK * weight.scale_stride;
  }
}

/* The part of a tile's inputs that does not depend on the expert. */
template <Operand kOperand>
__device__ __forceinline__ TileInputs expert_tile_inputs(const ExpertInputs& in, const ExpertTokens& tokens) {
  TileInputs tile = {};
  tile.tokens = tokens.data;
  tile.token_scales = tokens.scales;
  tile.k_bytes = in.x.cols * (kOperand == Operand::kBf16 ? 2 : 1);
  tile.steps = {0, (tile.k_bytes + kStepBytes - 1) / kStepBytes};
  return tile;
}

template <Operand kOperand>
__host__ __device__ __forceinline__ bool are_tokens_aligned(const ExpertInputs& in) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  return is_aligned_16(in.x.data, in.x.stride * kElement) && in.x.cols * kElement % 16 == 0;
}

template <Operand kOperand>
__device__ __forceinline__ bool is_weight_aligned(const glm_weight& weight) {
  return is_aligned_16(weight.data, weight.stride * (kOperand == Operand::kBf16 ? 2 : 1));
}

/* Output scales of eight neighbouring channels. */
struct ChannelScales {
  float values[kPack];
};

template <Operand kOperand>
__device__ __forceinline__ ChannelScales load_scales(const glm_weight& weight, int first) {
  ChannelScales scales;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    scales.values[i] = kOperand == Operand::kFp8Channel ? weight.scale[min(first + i, weight.rows - 1)] : 1.0f;
  }
  return scales;
}

template <typename Act>
__device__ __forceinline__ Act swiglu(float gate, float up) {
  const float activated = rounded_to<Act>(silu(rounded_to<Act>(gate)));
  return from_float<Act>(activated * rounded_to<Act>(up));
}

/* Calls f(Operand) as a compile-time value where tensor cores apply, else g(). */
template <typename F, typename G>
glm_status with_operand(glm_weight_format format, glm_dtype x, F&& f, G&& g) {
  switch (format) {
    case GLM_W_FP8_CHANNEL:
      return f(std::integral_constant<Operand, Operand::kFp8Channel>{});
    case GLM_W_FP8_BLOCK:
      return f(std::integral_constant<Operand, Operand::kFp8Block>{});
    case GLM_W_BF16:
      return x == GLM_BF16 ? f(std::integral_constant<Operand, Operand::kBf16>{}) : g();
    case GLM_W_F32:
    case GLM_W_F16:
      return g();
  }
  return GLM_INVALID_ARGUMENT;
}

/* The f32 path: the assignments [first, last) of the order, as far as one warp takes them. Returns how many. */
template <typename X>
__device__ __forceinline__ int find_dot_tokens(const ExpertInputs& in, int first, int last, const X* x[kDotTokens],
                                               int32_t assignments[kDotTokens]) {
  const int count = min(kDotTokens, last - first);
  for (int i = 0; i < kDotTokens; ++i) {
    assignments[i] = i < count ? in.order[first + i] : 0;
    x[i] = i < count ? row_of<X>(in.x, x_row(in, assignments[i])) : nullptr;
  }
  return count;
}

}  // namespace glm::cuda

#endif
