/* The two expert layers on wgmma: persistent blocks walk the tiles of all experts, so that the copies of a tile start while the one
 * before it is still multiplied. Included by one source file an operand type. */
#ifndef GLM_CUDA_EXPERTS_WGMMA_CUH
#define GLM_CUDA_EXPERTS_WGMMA_CUH

#include "experts_tile.cuh"
#include "launch.h"

namespace glm::cuda {

/* What the multiplying warps know of a tile's tokens; two tiles alternate. */
template <int kTokens>
struct ExpertTables {
  int32_t assignments[2][kTokens];
  const float* scales[2][kTokens];
  float row_scales[2][kTokens];
  bf16 y[kTokens][kWgmmaPitch + 4]; /* rows of 144 bytes */
};

template <Operand kOperand, int kTokens>
__device__ __forceinline__ void fill_tables(const ExpertInputs& in, const ExpertTile& tile, int half,
                                            ExpertTables<kTokens>& tables) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kTokens) { /* past the last token, the last again */
    const int32_t assignment = in.order[tile.first + min(i, tile.count - 1)];
    tables.assignments[half][i] = assignment;
    if (kOperand != Operand::kBf16) {
      tables.scales[half][i] = row_of<float>(in.x_scale, x_row(in, assignment));
      tables.row_scales[half][i] = *tables.scales[half][i];
    }
  }
  named_barrier(kMultiplyBarrier, kWarpgroup);
}

/* Of the thread's rows group and group + 8: gate and up of one channel, or two channels of down. */
struct RowScales {
  float values[2];
};

template <ExpertLayer kLayer, Operand kOperand>
__device__ __forceinline__ RowScales find_row_scales(const ExpertPair& weights, int channel) {
  RowScales scales = {1.0f, 1.0f};
  if constexpr (kOperand == Operand::kFp8Channel) {
    const int last = weights.first.rows - 1;
    scales.values[0] = weights.first.scale[min(channel, last)];
    scales.values[1] = kLayer == ExpertLayer::kGateUp ? weights.second.scale[min(channel, last)]
                                                      : weights.first.scale[min(channel + 8, last)];
  }
  return scales;
}

template <ExpertLayer kLayer, Operand kOperand, int kTokens>
__device__ __forceinline__ BlockScales find_block_scales(const ExpertPair& weights, int channel, int half,
                                                         const ExpertTables<kTokens>& tables) {
  BlockScales scales = {};
  if (kOperand == Operand::kFp8Block) {
    const int64_t row = channel / GLM_FP8_BLOCK;
    scales.tokens = tables.scales[half];
    scales.weights[0] = weights.first.scale + row * weights.first.scale_stride;
    scales.weights[1] =
        kLayer == ExpertLayer::kGateUp ? weights.second.scale + row * weights.second.scale_stride : scales.weights[0];
  }
  return scales;
}

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
    float low = sums[i / 2 * 4 + i % 2];
    float high = sums[i / 2 * 4 + i % 2 + 2];
    if constexpr (kOperand == Operand::kFp8Channel) {
      low = low * tables.row_scales[half][token] * rows.values[0];
      high = high * tables.row_scales[half][token] * rows.values[1];
    }
    if constexpr (kLayer == ExpertLayer::kGateUp) {
      tables.y[token][warp * 8 + group] = swiglu<bf16>(low, high);
    } else {
      tables.y[token][warp * 16 + group] = from_float<bf16>(low);
      tables.y[token][warp * 16 + group + 8] = from_float<bf16>(high);
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
  for (int i = static_cast<int>(threadIdx.x) / kPacks; i < tile.count && channels > 0; i += kWarpgroup / kPacks) {
    float values[kPack];
    load_pack(tables.y[i] + channel, 0, kPack, values);
    store_pack(row_of<bf16>(p.y, tables.assignments[half][i]) + tile.channel + channel, 0, channels, values);
  }
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
  if (tile.count <= 8) {
    multiply_expert<kLayer, kOperand, 8>(p, tile, half, pipe, tables, at);
  } else if (kTokens == 16 || tile.count <= 16) {
    multiply_expert<kLayer, kOperand, 16>(p, tile, half, pipe, tables, at);
  } else if constexpr (kTokens > 16) {
    if (tile.count <= 32) {
      multiply_expert<kLayer, kOperand, 32>(p, tile, half, pipe, tables, at);
    } else {
      multiply_expert<kLayer, kOperand, 64>(p, tile, half, pipe, tables, at);
    }
  }
}

/* Where the weights lie, into the L2: a table that no operation writes. */
__device__ __forceinline__ void prefetch_table(const glm_expert_weights& weights) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < weights.count) asm volatile("prefetch.global.L2 [%0];" ::"l"(weights.experts + i));
}

template <ExpertLayer kLayer, Operand kOperand, int kTokens>
__global__ void __launch_bounds__(kWgmmaThreads, 2) expert_wgmma_kernel(const __grid_constant__ ExpertParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wgmma_stages(kTokens)> ring;
  __shared__ ExpertTables<kTokens> tables;
  const WgmmaPipe<kTokens> pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  int32_t* offsets = reinterpret_cast<int32_t*>(pipe.stages + wgmma_stages(kTokens) * wgmma_stage_bytes(kTokens));
  release_successor();
  prefetch_table(p.first);
  if (kLayer == ExpertLayer::kGateUp) prefetch_table(p.second);
  wait_for_predecessor();
  if (p.skip != nullptr && *p.skip != 0) return;
  for (int i = static_cast<int>(threadIdx.x); i <= p.first.count; i += kWgmmaThreads) offsets[i] = p.in.offsets[i];
  pipe.init();
  typename WgmmaPipe<kTokens>::Place at;
  const Role role = role_of_warp();
  int half = 0;
  using Walk = ExpertWalk<kLayerChannels<kLayer>, kTokens>;
  for (Walk walk(p, offsets, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)); walk.find();
       walk.next(), half ^= 1) {
    const ExpertTile tile = walk.tile();
    if (role == Role::kLoadWeights) {
      const ExpertPair weights = expert_weights<kLayer>(p, tile.expert);
      pipe.load_weights(expert_rows<kLayer, kOperand>(weights, tile.channel), p.steps(), p.k_bytes,
                        are_aligned<kLayer, kOperand>(weights, p), at);
    } else if (role == Role::kLoadTokens) {
      pipe.load_tokens(assignment_rows<kOperand, kTokens>(p.in, tile), p.steps(), p.k_bytes, p.tokens_aligned, at);
    } else {
      fill_tables<kOperand>(p.in, tile, half, tables);
      multiply_narrowly<kLayer, kOperand>(p, tile, half, pipe, tables, at);
      named_barrier(kMultiplyBarrier, kWarpgroup);
      store_outputs<kLayer>(p, tile, half, tables);
    }
  }
}

template <ExpertLayer kLayer, Operand kOperand, int kTokens>
glm_status launch_experts(glm_device* device, const ExpertParams& p) {
  constexpr int kBlocksPerMultiprocessor = 2;
  const size_t bytes = kSwizzleAlignment + static_cast<size_t>(wgmma_stages(kTokens)) * wgmma_stage_bytes(kTokens) +
                       (static_cast<size_t>(p.first.count) + 1) * sizeof(int32_t);
  const Grid grid{dim3(static_cast<unsigned>(device->sm_count * kBlocksPerMultiprocessor)), kWgmmaThreads, bytes};
  return launch(device, kLayer == ExpertLayer::kGateUp ? "moe_gate_up" : "moe_down", grid,
                expert_wgmma_kernel<kLayer, kOperand, kTokens>, p);
}

template <ExpertLayer kLayer, Operand kOperand>
glm_status experts_on_wgmma(glm_device* device, const ExpertParams& params, int rows) {
  if (rows == 0) return GLM_OK;
  ExpertParams p = params;
  p.k_bytes = p.in.x.cols * (kOperand == Operand::kBf16 ? 2 : 1);
  p.tokens_aligned = are_tokens_aligned<kOperand>(p.in);
  if (rows <= 16) return launch_experts<kLayer, kOperand, 16>(device, p);
  return launch_experts<kLayer, kOperand, 64>(device, p);
}

}  // namespace glm::cuda

#endif
