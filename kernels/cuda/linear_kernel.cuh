/* Linear layers on tensor cores; included by one source file an operand type. */
#ifndef GLM_CUDA_LINEAR_KERNEL_CUH
#define GLM_CUDA_LINEAR_KERNEL_CUH

#include "linear_tile.cuh"

namespace glm::cuda {

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
  const ChannelEpilogue epilogue = load_epilogue<kOperand, kTileChannels<kWarpsN>>(p, place);
  stream_tile<kOperand, kTokenTiles, kWarpsN, kAligned>(in, reinterpret_cast<uint8_t*>(shared), [&] {
    find_tokens<kOperand, kTokenTiles>(p, place.token, rows);
    wait_for_predecessor();
    const int i = static_cast<int>(threadIdx.x);
    if (kOperand == Operand::kFp8Channel && i < kTokenTiles * 8) rows.row_scales[i] = *rows.scales[i];
  });
  finish_tile<kOperand, kTokenTiles * 8, kTileChannels<kWarpsN>, kTileThreads<kWarpsN>>(
      p, place, epilogue, rows.row_scales, reinterpret_cast<float*>(shared));
}

template <Operand kOperand, int kTokenTiles, int kWarpsN, bool kAligned>
glm_status launch_tiles(glm_device* device, const glm_linear_args& args) {
  LinearParams p = linear_params(args, kTileChannels<kWarpsN>);
  p.k_bytes = args.x.cols * (kOperand == Operand::kBf16 ? 2 : 1);
  p.split = split_of<kOperand>(p.tiling.first_channel[args.num_parts], p.k_bytes);
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
