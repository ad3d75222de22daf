/* How a block walks the tiles of all experts: the copies of a tile start while the one before it is still multiplied. */
#ifndef GLM_CUDA_EXPERTS_WALK_CUH
#define GLM_CUDA_EXPERTS_WALK_CUH

#include "experts_tables.cuh"

namespace glm::cuda {

/* The thread's outputs of a tile, rounded to bf16, into tables.y[token][channel of the tile]. */
template <ExpertLayer kLayer, Operand kOperand, int N, int kTokens>
__device__ __forceinline__ void stage_outputs(const float* sums, const RowScales& rows, int half,
                                              ExpertTables<kTokens>& tables) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const int token = i / 2 * 8 + member * 2 + i % 2;
    const ExpertSums own{sums[i / 2 * 4 + i % 2], sums[i / 2 * 4 + i % 2 + 2]};
    const ExpertOutputs out = finish_sums<kLayer, kOperand>(own, tables.row_scales[half][token], rows);
    if constexpr (kLayer == ExpertLayer::kGateUp) {
      tables.y[token][warp * 8 + group] = out.low;
    } else {
      tables.y[token][warp * 16 + group] = out.low;
      tables.y[token][warp * 16 + group + 8] = out.high;
    }
  }
}

/* The staged tile to its rows of y, 16 bytes at a time. */
template <ExpertLayer kLayer, int kTokens>
__device__ __forceinline__ void store_outputs(const ExpertParams& p, const ExpertTile& tile, int half,
                                              const ExpertTables<kTokens>& tables) {
  constexpr int kPacks = kLayerChannels<kLayer> / kPack;
  const int channel = static_cast<int>(threadIdx.x) % kPacks * kPack;
  const int channels = min(kPack, p.first.rows - tile.channel - channel);
  with_output_rows<kLayer>(p, [&](auto&& row) {
    for (int i = static_cast<int>(threadIdx.x) / kPacks; i < tile.count && channels > 0; i += kWarpgroup / kPacks) {
      float values[kPack];
      load_pack(tables.y[i] + channel, 0, kPack, values);
      store_pack(row(tables.assignments[half][i]) + tile.channel + channel, 0, channels, values);
    }
  });
}

template <ExpertLayer kLayer, Operand kOperand, int N, int kTokens>
__device__ __forceinline__ void multiply_expert(const ExpertParams& p, const ExpertTile& tile, int half,
                                                const WgmmaPipe<kTokens>& pipe, ExpertTables<kTokens>& tables,
                                                typename WgmmaPipe<kTokens>::Place& at) {
  constexpr int kRowsPerWarp = kLayer == ExpertLayer::kGateUp ? 8 : 16;
  const ExpertPair weights = expert_weights<kLayer>(p, tile.expert);
  const int channel =
      tile.channel + static_cast<int>(threadIdx.x) / kWarp * kRowsPerWarp + static_cast<int>(threadIdx.x) % kWarp / 4;
  const RowScales rows = find_row_scales<kLayer, kOperand>(weights, channel);
  const BlockScales blocks = find_block_scales<kLayer, kOperand, kTokens>(weights, tile.channel, half, tables);
  float sums[N / 2];
  multiply_steps<kOperand, N, kTokens>(sums, pipe, p.steps(), blocks, at);
  stage_outputs<kLayer, kOperand, N, kTokens>(sums, rows, half, tables);
}

/* As narrow in tokens as the tile allows, for the same bits. */
template <ExpertLayer kLayer, Operand kOperand, int kTokens>
__device__ __forceinline__ void multiply_narrowly(const ExpertParams& p, const ExpertTile& tile, int half,
                                                  const WgmmaPipe<kTokens>& pipe, ExpertTables<kTokens>& tables,
                                                  typename WgmmaPipe<kTokens>::Place& at) {
  if (kTokens == 8 || tile.count <= 8) {
    multiply_expert<kLayer, kOperand, 8>(p, tile, half, pipe, tables, at);
  } else if constexpr (kTokens > 8) {
    if (tile.count <= 16) {
      multiply_expert<kLayer, kOperand, 16>(p, tile, half, pipe, tables, at);
    } else if (kTokens == 32 || tile.count <= 32) {
      multiply_expert<kLayer, kOperand, 32>(p, tile, half, pipe, tables, at);
    } else if constexpr (kTokens > 32) {
      multiply_expert<kLayer, kOperand, 64>(p, tile, half, pipe, tables, at);
    }
  }
}

/* Calls f with every gridDim.x-th tile, which has up to kTokens tokens. */
template <ExpertLayer kLayer, int kTokens, typename F>
__device__ __forceinline__ void for_each_tile(const ExpertParams& p, const Listing& listing, F&& f) {
  using Walk = ExpertWalk<kLayerChannels<kLayer>, kTokens>;
  Walk walk(p, listing.offsets, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  for (; walk.find(); walk.next()) f(walk.tile());
}

/* By the warps of the other roles. */
template <ExpertLayer kLayer, Operand kOperand, int kTokens>
__device__ __forceinline__ void copy_experts(const ExpertParams& p, Role role, const Listing& listing,
                                             const WgmmaPipe<kTokens>& pipe) {
  wait_in_role<kLayer>(p, role);
  ExpertInputs in = p.in;
  in.order = listing.order;
  typename WgmmaPipe<kTokens>::Place at;
  for_each_tile<kLayer, kTokens>(p, listing, [&](const ExpertTile& tile) {
    if (role == Role::kLoadWeights) {
      const ExpertPair weights = expert_weights<kLayer>(p, tile.expert);
      pipe.load_weights(expert_rows<kLayer, kOperand>(weights, tile.channel), p.steps(), p.k_bytes,
                        are_aligned<kLayer, kOperand>(weights, p), at);
    } else {
      pipe.load_tokens(assignment_rows<kOperand, kTokens>(in, tile), p.steps(), p.k_bytes, p.tokens_aligned, at);
    }
  });
}

/* By the multiplying warps. */
template <ExpertLayer kLayer, Operand kOperand, int kTokens>
__device__ __forceinline__ void multiply_experts(const ExpertParams& p, const Listing& listing,
                                                 const WgmmaPipe<kTokens>& pipe, ExpertTables<kTokens>& tables) {
  wait_in_role<kLayer>(p, Role::kMultiply);
  ExpertInputs in = p.in;
  in.order = listing.order;
  typename WgmmaPipe<kTokens>::Place at;
  int half = 0;
  for_each_tile<kLayer, kTokens>(p, listing, [&](const ExpertTile& tile) {
    fill_tables<kOperand>(in, tile, half, tables);
    multiply_narrowly<kLayer, kOperand>(p, tile, half, pipe, tables, at);
    named_barrier(kMultiplyBarrier, kWarpgroup);
    store_outputs<kLayer>(p, tile, half, tables);
    half ^= 1;
  });
}

/* By the whole block. */
template <ExpertLayer kLayer, Operand kOperand, int kTokens>
__device__ __forceinline__ void walk_experts(const ExpertParams& p, const Listing& listing,
                                             const WgmmaPipe<kTokens>& pipe, ExpertTables<kTokens>& tables) {
  const Role role = role_of_warp();
  if (role == Role::kMultiply) {
    multiply_experts<kLayer, kOperand>(p, listing, pipe, tables);
  } else {
    copy_experts<kLayer, kOperand>(p, role, listing, pipe);
  }
}

}  // namespace glm::cuda

#endif
