/* Where the tiles of a linear layer lie, how their K is split over a cluster, and what turns partial sums into output. */
#ifndef GLM_CUDA_LINEAR_TILE_CUH
#define GLM_CUDA_LINEAR_TILE_CUH

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

/* What a thread's eight channels are scaled by and added to. */
struct ChannelEpilogue {
  int first; /* within the tile */
  int count; /* of them inside the part */
  float scale[kPack];
  float bias[kPack];
};

template <Operand kOperand, int kChannels>
__device__ __forceinline__ ChannelEpilogue load_epilogue(const LinearParams& p, const TilePlace& place) {
  const glm_weight& weight = p.parts[place.part];
  const float* bias = p.bias[place.part];
  ChannelEpilogue e;
  e.first = static_cast<int>(threadIdx.x) % (kChannels / kPack) * kPack;
  e.count = min(kPack, weight.rows - place.channel - e.first);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const int channel = min(place.channel + e.first + i, weight.rows - 1);
    e.scale[i] = kOperand == Operand::kFp8Channel ? weight.scale[channel] : 1.0f;
    e.bias[i] = bias == nullptr ? 0.0f : bias[channel];
  }
  return e;
}

/* Adds the tile's partial sums in order of rank. own: this block's rank. */
__device__ __forceinline__ ChannelSums sum_ranks(float* partials, int at, int split, int own) {
  if (split == 1) return load_sums(partials + at);
  auto cluster = cooperative_groups::this_cluster();
  const int first = static_cast<int>(cluster.block_rank()) - own;
  ChannelSums parts[kMaxSplit];
#pragma unroll
  for (int rank = 0; rank < kMaxSplit; ++rank) {
    if (rank < split) parts[rank] = load_sums(cluster.map_shared_rank(partials, first + rank) + at);
  }
  ChannelSums total = parts[0];
#pragma unroll
  for (int rank = 1; rank < kMaxSplit; ++rank) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) total.values[i] += rank < split ? parts[rank].values[i] : 0.0f;
  }
  return total;
}

/* Stores a token of the tile, eight channels of whose sums this thread has. */
template <Operand kOperand>
__device__ __forceinline__ void finish_token(const LinearParams& p, const TilePlace& place,
                                             const ChannelEpilogue& epilogue, float row_scale, int token,
                                             ChannelSums sums) {
  const int column = p.tiling.first_channel[place.part] + place.channel + epilogue.first;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    if (kOperand == Operand::kFp8Channel) sums.values[j] = sums.values[j] * row_scale * epilogue.scale[j];
    sums.values[j] += epilogue.bias[j];
  }
  if (p.out.dtype == GLM_BF16) {
    store_pack(row_of<bf16>(p.out, place.token + token) + column, 0, epilogue.count, sums.values);
  } else {
    store_pack(row_of<float>(p.out, place.token + token) + column, 0, epilogue.count, sums.values);
  }
}

/* From partials[token][channel] with a pitch of kChannels + 4. Each block of the cluster finishes every split-th token, a thread eight channels at a time. */
template <Operand kOperand, int kTokens, int kChannels, int kThreads>
__device__ __forceinline__ void finish_tile(const LinearParams& p, const TilePlace& place,
                                            const ChannelEpilogue& epilogue, const float* row_scales, float* partials) {
  constexpr int kGroups = kChannels / kPack;
  constexpr int kPitch = kChannels + 4;
  constexpr int kTokensPerTurn = kThreads / kGroups;
  const int tokens = min(kTokens, p.rows - place.token);
  if (p.split > 1) cooperative_groups::this_cluster().sync();
  for (int i = static_cast<int>(threadIdx.x) / kGroups; i < kTokens / p.split; i += kTokensPerTurn) {
    const int token = i * p.split + place.rank;
    if (token >= tokens || epilogue.count <= 0) break;
    const ChannelSums sums = sum_ranks(partials, token * kPitch + epilogue.first, p.split, place.rank);
    finish_token<kOperand>(p, place, epilogue, row_scales[token], token, sums);
  }
  if (p.split > 1) cluster_leave_together();
}

/* Blocks that share a tile's K. A function of the shape alone, because it fixes the order of the sums. FP8: enough for most of the
 * multiprocessors, so that a successor's blocks find room beside them; tiles that fill half of them are not split, which leaves prefill its
 * widest tiles. bf16: enough that a last, partly filled turn of blocks costs little. */
template <Operand kOperand>
int split_of(int channels, int k_bytes) {
  constexpr bool kBf16 = kOperand == Operand::kBf16;
  constexpr int kEnoughBlocks = kBf16 ? 512 : 112;
  constexpr int kEnoughTiles = kBf16 ? 512 : 72;
  const int tiles = (channels + kTileChannels<2> - 1) / kTileChannels<2>;
  const int steps = (k_bytes + kStepBytes - 1) / kStepBytes;
  if (tiles >= kEnoughTiles) return 1;
  int split = 1;
  while (split < kMaxSplit && tiles * split < kEnoughBlocks && steps / (2 * split) >= 2 * kWarpsK) split *= 2;
  return split;
}

/* Rows of a box of tokens, of which `boxes` make a tile: no more than there are, for rows past the last cost a tensor copy more than others. */
inline int box_rows_of(int rows, int tile_tokens, int boxes) {
  constexpr int kRowsOfSwizzle = 8;
  const int enough = (rows + boxes * kRowsOfSwizzle - 1) / (boxes * kRowsOfSwizzle) * kRowsOfSwizzle;
  return enough < tile_tokens / boxes ? enough : tile_tokens / boxes;
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

}  // namespace glm::cuda

#endif
