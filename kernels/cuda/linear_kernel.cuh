/* Linear layers on tensor cores; included by one source file an operand type. */
#ifndef GLM_CUDA_LINEAR_KERNEL_CUH
#define GLM_CUDA_LINEAR_KERNEL_CUH

#include <cooperative_groups.h>

#include "launch.h"
#include "linear.h"
#include "row.cuh"

namespace glm::cuda {

constexpr int kMaxSplit = 8; /* blocks of a portable cluster */

/* Where a block's tile lies. */
struct TilePlace {
  int part;
  int channel; /* first, within the part */
  int token;   /* first */
  int rank;    /* within the K split */
};

__device__ __forceinline__ TilePlace tile_place(const LinearParams& p, int tokens_per_tile) {
  const int tile = static_cast<int>(blockIdx.x) / p.split;
  int part = 0;
  while (part + 1 < p.num_parts && tile >= p.tiling.first_tile[part + 1]) ++part;
  return {part, (tile - p.tiling.first_tile[part]) * p.tiling.channels, static_cast<int>(blockIdx.y) * tokens_per_tile,
          static_cast<int>(blockIdx.x) % p.split};
}

/* Shared tables of the tokens' rows, and their scales where one covers the row. */
template <int kTokenTiles>
struct TokenRows {
  const uint8_t* data[kTokenTiles * 8];
  const float* scales[kTokenTiles * 8];
  float row_scales[kTokenTiles * 8];
};

/* Tokens past the last repeat it. */
template <Operand kOperand, int kTokenTiles>
__device__ __forceinline__ void find_tokens(const LinearParams& p, int first, TokenRows<kTokenTiles>& rows) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kTokenTiles * 8) {
    const int64_t token = min(first + i, p.rows - 1);
    constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
    rows.data[i] = static_cast<const uint8_t*>(p.x.data) + token * p.x.stride * kElement;
    rows.scales[i] = kOperand == Operand::kBf16 ? nullptr : row_of<float>(p.x_scale, token);
  }
  __syncthreads();
}

/* This thread's weight rows; rows past the part's end repeat its last one, and their sums are not stored. */
template <Operand kOperand, int kWarpsN>
__device__ __forceinline__ void find_weights(const glm_weight& weight, int first_channel, TileInputs& in) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  const int warp = static_cast<int>(threadIdx.x) / kWarp % kWarpsN;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int64_t row = min(first_channel + warp * 16 * kRowTiles + i * 8 + group, weight.rows - 1);
    in.weights[i] = static_cast<const uint8_t*>(weight.data) + row * weight.stride * kElement;
    if (kOperand == Operand::kFp8Block && i % 2 == 0) {
      in.weight_scales[i / 2] = weight.scale + row / GLM_FP8_BLOCK * weight.scale_stride;
    }
  }
}

/* What a thread's eight channels are scaled by and added to. */
struct ChannelEpilogue {
  int first; /* within the tile */
  int count; /* of them inside the part */
  float scale[kPack];
  float bias[kPack];
};

template <Operand kOperand, int kWarpsN>
__device__ __forceinline__ ChannelEpilogue load_epilogue(const LinearParams& p, const TilePlace& place) {
  const glm_weight& weight = p.parts[place.part];
  const float* bias = p.bias[place.part];
  ChannelEpilogue e;
  e.first = static_cast<int>(threadIdx.x) % (kTileChannels<kWarpsN> / kPack) * kPack;
  e.count = min(kPack, weight.rows - place.channel - e.first);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const int channel = min(place.channel + e.first + i, weight.rows - 1);
    e.scale[i] = kOperand == Operand::kFp8Channel ? weight.scale[channel] : 1.0f;
    e.bias[i] = bias == nullptr ? 0.0f : bias[channel];
  }
  return e;
}

/* Adds the cluster's partial sums in order of rank. */
__device__ __forceinline__ ChannelSums sum_ranks(float* partials, int at, int split) {
  if (split == 1) return load_sums(partials + at);
  auto cluster = cooperative_groups::this_cluster();
  ChannelSums parts[kMaxSplit];
#pragma unroll
  for (int rank = 0; rank < kMaxSplit; ++rank) {
    if (rank < split) parts[rank] = load_sums(cluster.map_shared_rank(partials, rank) + at);
  }
  ChannelSums total = parts[0];
#pragma unroll
  for (int rank = 1; rank < kMaxSplit; ++rank) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) total.values[i] += rank < split ? parts[rank].values[i] : 0.0f;
  }
  return total;
}

/* Each block of the cluster finishes every split-th token, a thread eight channels at a time. */
template <Operand kOperand, int kTokenTiles, int kWarpsN>
__device__ __forceinline__ void finish_tile(const LinearParams& p, const TilePlace& place,
                                            const ChannelEpilogue& epilogue, const float* row_scales, float* partials) {
  constexpr int kGroups = kTileChannels<kWarpsN> / kPack;
  constexpr int kTokensPerTurn = kTileThreads<kWarpsN> / kGroups;
  const int tokens = min(kTokenTiles * 8, p.rows - place.token);
  const int column = p.tiling.first_channel[place.part] + place.channel + epilogue.first;
  if (p.split > 1) cooperative_groups::this_cluster().sync();
  for (int i = static_cast<int>(threadIdx.x) / kGroups; i < kTokenTiles * 8 / p.split; i += kTokensPerTurn) {
    const int token = i * p.split + place.rank;
    if (token >= tokens || epilogue.count <= 0) break;
    ChannelSums sums = sum_ranks(partials, token * kPartialPitch<kWarpsN> + epilogue.first, p.split);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (kOperand == Operand::kFp8Channel) sums.values[j] = sums.values[j] * row_scales[token] * epilogue.scale[j];
      sums.values[j] += epilogue.bias[j];
    }
    if (p.out.dtype == GLM_BF16) {
      store_pack(row_of<bf16>(p.out, place.token + token) + column, 0, epilogue.count, sums.values);
    } else {
      store_pack(row_of<float>(p.out, place.token + token) + column, 0, epilogue.count, sums.values);
    }
  }
  if (p.split > 1) cluster_leave_together();
}

template <Operand kOperand, int kTokenTiles, int kWarpsN, bool kAligned>
__global__ void __launch_bounds__(kTileThreads<kWarpsN>) linear_kernel(const __grid_constant__ LinearParams p) {
  extern __shared__ uint4 shared[];
  __shared__ TokenRows<kTokenTiles> rows;
  release_successor();
  const TilePlace place = tile_place(p, kTokenTiles * 8);
  TileInputs in;
  find_weights<kOperand, kWarpsN>(p.parts[place.part], place.channel, in);
  in.tokens = rows.data;
  in.token_scales = rows.scales;
  in.k_bytes = p.k_bytes;
  in.steps.first = place.rank * p.steps_per_block;
  in.steps.last = min(in.steps.first + p.steps_per_block, (p.k_bytes + kStepBytes - 1) / kStepBytes);
  const ChannelEpilogue epilogue = load_epilogue<kOperand, kWarpsN>(p, place);
  stream_tile<kOperand, kTokenTiles, kWarpsN, kAligned>(in, reinterpret_cast<uint8_t*>(shared), [&] {
    find_tokens<kOperand, kTokenTiles>(p, place.token, rows);
    wait_for_predecessor();
    const int i = static_cast<int>(threadIdx.x);
    if (kOperand == Operand::kFp8Channel && i < kTokenTiles * 8) rows.row_scales[i] = *rows.scales[i];
  });
  finish_tile<kOperand, kTokenTiles, kWarpsN>(p, place, epilogue, rows.row_scales, reinterpret_cast<float*>(shared));
}

/* Blocks that share a tile's K. A function of the shape alone, because it fixes the order of the sums. */
inline int split_of(int channels, int k_bytes) {
  constexpr int kEnoughBlocks = 192; /* between one and two for each multiprocessor */
  const int tiles = (channels + kTileChannels<2> - 1) / kTileChannels<2>;
  const int steps = (k_bytes + kStepBytes - 1) / kStepBytes;
  int split = 1;
  while (split < kMaxSplit && tiles * split < kEnoughBlocks && steps / (2 * split) >= 2 * kWarpsK) split *= 2;
  return split;
}

inline bool is_aligned_16(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

inline bool is_aligned(const glm_linear_args& args, int element) {
  bool aligned = is_aligned_16(args.x.data, args.x.stride * element) && args.x.cols * element % 16 == 0;
  for (int i = 0; i < args.num_parts; ++i) {
    aligned = aligned && is_aligned_16(args.parts[i].data, args.parts[i].stride * element);
  }
  return aligned;
}

template <Operand kOperand, int kTokenTiles, int kWarpsN, bool kAligned>
glm_status launch_tiles(glm_device* device, const glm_linear_args& args) {
  LinearParams p = linear_params(args, kTileChannels<kWarpsN>);
  p.k_bytes = args.x.cols * (kOperand == Operand::kBf16 ? 2 : 1);
  p.split = split_of(p.tiling.first_channel[args.num_parts], p.k_bytes);
  p.steps_per_block = ((p.k_bytes + kStepBytes - 1) / kStepBytes + p.split - 1) / p.split;
  const Grid grid{dim3(p.tiling.first_tile[args.num_parts] * p.split, blocks_for(args.rows, kTokenTiles * 8)),
                  kTileThreads<kWarpsN>, tile_shared_bytes<kWarpsN>(kTokenTiles), p.split};
  return launch(device, "linear", grid, linear_kernel<kOperand, kTokenTiles, kWarpsN, kAligned>, p);
}

template <Operand kOperand, int kWarpsN>
glm_status launch_aligned(glm_device* device, const glm_linear_args& args) {
  if (args.rows <= 8) return launch_tiles<kOperand, 1, kWarpsN, true>(device, args);
  if (args.rows <= 16) return launch_tiles<kOperand, 2, kWarpsN, true>(device, args);
  if (args.rows <= 32) return launch_tiles<kOperand, 4, kWarpsN, true>(device, args);
  return launch_tiles<kOperand, 8, kWarpsN, true>(device, args);
}

template <Operand kOperand>
glm_status linear_on_tensor_cores(glm_device* device, const glm_linear_args& args) {
  if (!is_aligned(args, kOperand == Operand::kBf16 ? 2 : 1)) return launch_tiles<kOperand, 2, 2, false>(device, args);
  if constexpr (kOperand == Operand::kBf16) {
    /* A language model head: tiles of twice the width halve the reads of the tokens. */
    constexpr int kWideFrom = 16384; /* channels */
    int channels = 0;
    for (int i = 0; i < args.num_parts; ++i) channels += args.parts[i].rows;
    if (channels >= kWideFrom) return launch_aligned<kOperand, 4>(device, args);
  }
  return launch_aligned<kOperand, 2>(device, args);
}

}  // namespace glm::cuda

#endif
