/* Linear layers on wgmma; included by one source file an operand type. */
#ifndef GLM_CUDA_LINEAR_WGMMA_CUH
#define GLM_CUDA_LINEAR_WGMMA_CUH

#include "beside.h"
#include "cluster_sum.cuh"
#include "linear_tile.cuh"
#include "tensor_map.h"
#include "wgmma_tile.cuh"

namespace glm::cuda {

/* Rows past the part's end repeat its last one, and their sums are not stored. */
template <Operand kOperand>
__device__ __forceinline__ LoaderRows<8> weight_rows(const glm_weight& weight, int first) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  LoaderRows<8> from;
  from.groups = 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t row = min(first + i * 8 + loader_row(), weight.rows - 1);
    from.rows[i] = static_cast<const uint8_t*>(weight.data) + row * weight.stride * kElement;
  }
  return from;
}

/* Tokens past the last repeat it. */
template <Operand kOperand, int kTokens>
__device__ __forceinline__ LoaderRows<kTokens / 8> token_rows(const LinearParams& p, int first) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  LoaderRows<kTokens / 8> from;
  from.groups = kTokens / 8;
#pragma unroll
  for (int i = 0; i < kTokens / 8; ++i) {
    const int64_t row = min(first + i * 8 + loader_row(), p.rows - 1);
    from.rows[i] = static_cast<const uint8_t*>(p.x.data) + row * p.x.stride * kElement;
  }
  return from;
}

struct LinearWgmmaParams {
  LinearParams linear;
  int box_rows;  /* tokens that are copied at once: the tile's, or all */
  CUtensorMap x; /* if aligned: tokens are copied by tensor copies, and are zero past the last */
};

template <int kTokens>
struct TokenScales {
  const float* data[kTokens];
  float row[kTokens]; /* FP8_CHANNEL */
};

/* By the multiplying warps, once the predecessor's writes are visible. */
template <Operand kOperand, int kTokens>
__device__ __forceinline__ void find_scales(const LinearParams& p, int first, TokenScales<kTokens>& scales) {
  const int i = static_cast<int>(threadIdx.x);
  if (kOperand != Operand::kBf16 && i < kTokens) {
    scales.data[i] = row_of<float>(p.x_scale, min(first + i, p.rows - 1));
    scales.row[i] = __ldcg(scales.data[i]);
  }
  named_barrier(kMultiplyBarrier, kWarpgroup);
}

/* Of few tokens, blocks that split K send their sums to the block that finishes the token. */
template <int kTokens>
constexpr bool kSendsSums = kTokens <= 32;

/* What has been sent: [rank][own token][channel], every split-th token. */
struct SentSums {
  float* sums;
  uint64_t* arrived;
  int split_bits;

  template <int kTokens>
  __device__ __forceinline__ float* at(int rank, int token) const {
    return sums + (rank * (kTokens >> split_bits) + (token >> split_bits)) * kWgmmaChannels;
  }
};

template <int kTokens>
__device__ __forceinline__ void send_sums(const float* sums, const LinearParams& p, const TilePlace& place,
                                          const SentSums& sent) {
  const int channel = static_cast<int>(threadIdx.x) / kWarp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4;
  const int member = static_cast<int>(threadIdx.x) % 4;
  cluster_wait();
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    const int token = i / 4 * 8 + member * 2 + i % 2;
    if (place.token + token >= p.rows) continue;
    send_sum(sent.at<kTokens>(place.rank, token) + channel + i / 2 % 2 * 8, sent.arrived, token & (p.split - 1),
             sums[i]);
  }
}

/* By the multiplying warps: adds in order of rank. */
template <Operand kOperand, int kTokens>
__device__ __forceinline__ void finish_sent(const LinearParams& p, const TilePlace& place,
                                            const ChannelEpilogue& epilogue, const float* row_scales,
                                            const SentSums& sent) {
  constexpr int kGroups = kWgmmaChannels / kPack;
  static_assert(kTokens / 2 * kGroups <= kWarpgroup);
  const int token = (static_cast<int>(threadIdx.x) / kGroups << sent.split_bits) + place.rank;
  if (token >= min(kTokens, p.rows - place.token) || epilogue.count <= 0) return;
  barrier_wait_cluster(sent.arrived, 0);
  ChannelSums parts[kMaxSplit];
#pragma unroll
  for (int rank = 0; rank < kMaxSplit; ++rank) {
    if (rank < p.split) parts[rank] = load_sums(sent.at<kTokens>(rank, token) + epilogue.first);
  }
  ChannelSums total = parts[0];
#pragma unroll
  for (int rank = 1; rank < kMaxSplit; ++rank) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (rank < p.split) total.values[i] += parts[rank].values[i];
    }
  }
  finish_token<kOperand>(p, place, epilogue, row_scales[token], token, total);
}

template <Operand kOperand, int kTokens>
__device__ __forceinline__ void multiply_tile(const LinearParams& p, const TilePlace& place, StepRange steps,
                                              const WgmmaPipe<kTokens>& pipe, TokenScales<kTokens>& token_scales,
                                              const SentSums& sent) {
  begin_turn(p.beside);
  find_scales<kOperand, kTokens>(p, place.token, token_scales);
  BlockScales scales = {};
  if (kOperand == Operand::kFp8Block) {
    const glm_weight& weight = p.parts[place.part];
    scales.tokens = token_scales.data;
    scales.weights[0] = weight.scale + place.channel / GLM_FP8_BLOCK * weight.scale_stride;
    scales.weights[1] = scales.weights[0];
  }
  float sums[kTokens / 2];
  typename WgmmaPipe<kTokens>::Place at;
  multiply_steps<kOperand, kTokens, kTokens>(sums, pipe, steps, scales, at);
  if (kSendsSums<kTokens> && p.split > 1) return send_sums<kTokens>(sums, p, place, sent);
  named_barrier(kMultiplyBarrier, kWarpgroup); /* the stages make room for the partial sums */
  store_partials<kTokens>(sums, reinterpret_cast<float*>(pipe.stages));
}

template <Operand kOperand, int kTokens>
__global__ void __launch_bounds__(kWgmmaThreads, 2)
    linear_wgmma_kernel(const __grid_constant__ LinearWgmmaParams params) {
  const LinearParams& p = params.linear;
  extern __shared__ uint4 shared[];
  __shared__ Ring<wgmma_stages(kTokens)> ring;
  __shared__ TokenScales<kTokens> scales;
  const WgmmaPipe<kTokens> pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  __shared__ uint64_t arrived;
  const TilePlace place = tile_place(p, kTokens);
  const bool sends = kSendsSums<kTokens> && p.split > 1;
  const SentSums sent{reinterpret_cast<float*>(pipe.stages + wgmma_stages(kTokens) * wgmma_stage_bytes(kTokens)),
                      &arrived, __ffs(p.split) - 1};
  if (sends && threadIdx.x == 0) {
    const int own_tokens = (min(kTokens, p.rows - place.token) + p.split - 1 - place.rank) >> sent.split_bits;
    expect_sums(&arrived, own_tokens * p.split * kWgmmaChannels * sizeof(float));
  }
  pipe.init(p.aligned ? 1 : kLoaderThreads);
  if (sends) cluster_arrive_started();
  const int first = place.rank * p.steps_per_block;
  const StepRange steps{first, min(first + p.steps_per_block, (p.k_bytes + kStepBytes - 1) / kStepBytes)};
  const ChannelEpilogue epilogue = load_epilogue<kOperand, kWgmmaChannels>(p, place);
  typename WgmmaPipe<kTokens>::Place at;
  switch (role_of_warp()) {
    case Role::kLoadWeights:
      pipe.load_weights(weight_rows<kOperand>(p.parts[place.part], place.channel), steps, p.k_bytes, p.aligned, at);
      break;
    case Role::kLoadTokens:
      if (p.aligned && threadIdx.x % kLoaderThreads == 0) prefetch_map(&params.x);
      begin_turn(p.beside);
      if (!p.aligned) {
        pipe.load_tokens(token_rows<kOperand, kTokens>(p, place.token), steps, p.k_bytes, false, at);
      } else if (threadIdx.x % kLoaderThreads == 0) {
        pipe.copy_tokens(&params.x, place.token, params.box_rows, steps, at);
      }
      break;
    case Role::kMultiply:
      multiply_tile<kOperand, kTokens>(p, place, steps, pipe, scales, sent);
      break;
  }
  if constexpr (kSendsSums<kTokens>) {
    if (sends && threadIdx.x < kWarpgroup) finish_sent<kOperand, kTokens>(p, place, epilogue, scales.row, sent);
  }
  if (!sends) {
    meet_all_roles();
    finish_tile<kOperand, kTokens, kWgmmaChannels, kWgmmaThreads>(p, place, epilogue, scales.row,
                                                                  reinterpret_cast<float*>(pipe.stages));
  }
  end_turn(p.beside);
}

template <Operand kOperand, int kTokens>
glm_status launch_wgmma(glm_device* device, const glm_linear_args& args) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  LinearWgmmaParams params = {linear_params(args, kWgmmaChannels), 0, {}};
  LinearParams& p = params.linear;
  p.aligned = is_aligned(args, kElement);
  p.k_bytes = args.x.cols * kElement;
  p.split = split_of<kOperand>(p.tiling.first_channel[args.num_parts], p.k_bytes);
  p.steps_per_block = ((p.k_bytes + kStepBytes - 1) / kStepBytes + p.split - 1) / p.split;
  if (p.aligned) {
    params.box_rows = box_rows_of(args.rows, kTokens, 1);
    const glm_status status = encode_map(device, "x", &params.x, args.x.data, args.rows, p.k_bytes,
                                         args.x.stride * kElement, params.box_rows);
    if (status != GLM_OK) return status;
  }
  const Turn turn(device, touched_by(args), LineOfCall::Kind::kMayBranch);
  /* Other operands are read through the L1. */
  p.beside = turn.beside() && p.aligned && kOperand != Operand::kFp8Block;
  const size_t stages = static_cast<size_t>(wgmma_stages(kTokens)) * wgmma_stage_bytes(kTokens);
  const size_t sent_bytes = kSendsSums<kTokens> && p.split > 1 ? kTokens * kWgmmaChannels * sizeof(float) : 0;
  const Grid grid{dim3(p.tiling.first_tile[args.num_parts] * p.split, blocks_for(args.rows, kTokens)), kWgmmaThreads,
                  stages + kSwizzleAlignment + sent_bytes, p.split, p.beside};
  return launch(device, "linear", grid, linear_wgmma_kernel<kOperand, kTokens>, params);
}

template <Operand kOperand>
glm_status linear_on_wgmma(glm_device* device, const glm_linear_args& args) {
  if (args.rows <= 8) return launch_wgmma<kOperand, 8>(device, args);
  if (args.rows <= 16) return launch_wgmma<kOperand, 16>(device, args);
  if (args.rows <= 32) return launch_wgmma<kOperand, 32>(device, args);
  if constexpr (kOperand == Operand::kBf16) {
    if (args.rows > 64 && args.rows <= 128) return launch_wgmma<kOperand, 128>(device, args);
  }
  return launch_wgmma<kOperand, 64>(device, args);
}

}  // namespace glm::cuda

#endif
