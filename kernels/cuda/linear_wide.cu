/* Linear layers of many tokens on Hopper: FP8 with a scale a channel, bf16 output. */
#include <algorithm>

#include "linear_tile.cuh"
#include "tensor_map.h"
#include "wide_tile.cuh"

namespace glm::cuda {

namespace {

struct WideParams {
  LinearParams linear;
  int channel_tiles;
  int token_tiles;
  int cluster_tiles; /* of a cluster each */
  int steps;
  CUtensorMap x;
  CUtensorMap weights[GLM_MAX_PARTS];
  CUtensorMap out[GLM_MAX_PARTS]; /* the parts' columns of the output */
};

struct WideTile {
  int part; /* -1: past the last tile of channels */
  int channel;
  int token;
};

/* Of a cluster's tiles, this block's. Blocks that run at once share as few channels and tokens as possible: they walk bands of kBand tiles of
 * tokens. */
__device__ __forceinline__ WideTile wide_tile(const WideParams& p, int index, int tokens_per_tile) {
  constexpr int kBand = 8;
  const int pairs = (p.channel_tiles + kWideCluster - 1) / kWideCluster;
  const int band = index / (kBand * pairs);
  const int height = min(kBand, p.token_tiles - band * kBand);
  const int within = index - band * kBand * pairs;
  const int tile = within / height * kWideCluster + static_cast<int>(cluster_rank());
  const int token = (band * kBand + within % height) * tokens_per_tile;
  if (tile >= p.channel_tiles) return {-1, 0, token};
  int part = 0;
  while (part + 1 < p.linear.num_parts && tile >= p.linear.tiling.first_tile[part + 1]) ++part;
  return {part, (tile - p.linear.tiling.first_tile[part]) * kWideChannels, token};
}

/* Scales and biases of the thread's two rows. */
struct WideEpilogue {
  float scale[2];
  float bias[2];
};

__device__ __forceinline__ WideEpilogue wide_epilogue(const LinearParams& p, const WideTile& tile) {
  WideEpilogue e = {};
  if (tile.part < 0) return e;
  const glm_weight& weight = p.parts[tile.part];
  const float* bias = p.bias[tile.part];
  const int first =
      tile.channel + static_cast<int>(threadIdx.x) / kWarp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int channel = min(first + i * 8, weight.rows - 1);
    e.scale[i] = weight.scale[channel];
    e.bias[i] = bias == nullptr ? 0.0f : bias[channel];
  }
  return e;
}

/* By a multiplying warpgroup: its outputs, which a tensor copy stores while the next tile is multiplied. */
template <bool kSegmented, int kChunks>
__device__ __forceinline__ void multiply_and_store(const WideParams& p, const WideTile& tile,
                                                   const WidePipe<kChunks>& pipe, float* row_scales,
                                                   typename WidePipe<kChunks>::Place& at) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  float own_scales[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int token = min(tile.token + chunk * kChunkTokens + thread, p.linear.rows - 1);
    own_scales[chunk] = *row_of<float>(p.linear.x_scale, token);
  }
  const WideEpilogue epilogue = wide_epilogue(p.linear, tile);
  WideSums<kChunks> sums;
  multiply_wide<kSegmented>(sums, pipe, p.steps, p.linear.steps_per_block, at);
  if (thread == 0) wait_stores<0>();
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) row_scales[chunk * kChunkTokens + thread] = own_scales[chunk];
  named_barrier(kWideBarrier + group, kWarpgroup);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float* scales = row_scales + chunk * kChunkTokens;
    uint8_t* staged = pipe.outputs(chunk, group);
    stage_chunk(sums[chunk], staged, [&](float sum, int token, int row) {
      return sum * scales[token] * epilogue.scale[row] + epilogue.bias[row];
    });
    fence_async_proxy();
    named_barrier(kWideBarrier + group, kWarpgroup);
    const int channel = tile.channel + group * kWgmmaChannels;
    if (thread == 0 && tile.part >= 0 && channel < p.linear.parts[tile.part].rows) {
      store_box(&p.out[tile.part], channel * static_cast<int>(sizeof(bf16)), tile.token + chunk * kChunkTokens, staged);
    }
  }
  if (thread == 0) commit_stores();
}

/* By one thread: all tiles. The first weights are on their way before the predecessor's end. */
template <int kChunks, typename F>
__device__ __forceinline__ void copy_tiles(const WideParams& p, const WidePipe<kChunks>& pipe, F&& for_each_tile) {
  typename WidePipe<kChunks>::Place at;
  int ahead = -1;
  for_each_tile([&](const WideTile& tile) {
    const CUtensorMap* map = &p.weights[max(tile.part, 0)];
    const auto copy_weights = [&](uint8_t* to, int column, uint64_t* full) {
      copy_box(to, map, column, tile.channel, full);
    };
    if (ahead < 0) {
      ahead = pipe.load_ahead(copy_weights, kChunks, p.steps);
      wait_for_predecessor();
    }
    pipe.load(copy_weights, &p.x, tile.token, kChunks, p.steps, at, ahead);
    ahead = 0;
  });
}

template <bool kSegmented, int kChunks>
__global__ void __launch_bounds__(kWideThreads, 1) linear_wide_kernel(const __grid_constant__ WideParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wide_stages(kChunks)> ring;
  __shared__ float row_scales[kWideGroups][kChunks * kChunkTokens];
  release_successor();
  const WidePipe<kChunks> pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  pipe.init();
  const int clusters = static_cast<int>(gridDim.x) / kWideCluster;
  const int cluster = static_cast<int>(blockIdx.x) / kWideCluster;
  const auto for_each_tile = [&](auto&& f) {
    for (int index = cluster; index < p.cluster_tiles; index += clusters) {
      f(wide_tile(p, index, kChunks * kChunkTokens));
    }
  };
  const WideRole role = wide_role();
  if (role == WideRole::kMultiply) {
    take_registers<kMultiplyRegisters>();
    typename WidePipe<kChunks>::Place at;
    wait_for_predecessor();
    float* scales = row_scales[threadIdx.x / kWarpgroup];
    for_each_tile([&](const WideTile& tile) { multiply_and_store<kSegmented, kChunks>(p, tile, pipe, scales, at); });
    if (threadIdx.x % kWarpgroup == 0) wait_stores<0>();
  } else {
    leave_registers<kCopyRegisters>();
    if (role == WideRole::kCopy) copy_tiles<kChunks>(p, pipe, for_each_tile);
  }
  cluster_sync(); /* no block leaves while the other still arrives at its barriers */
}

/* A part's columns of the output. */
bf16* part_output(const glm_linear_args& args, int part) {
  auto* out = static_cast<bf16*>(args.out.data);
  for (int i = 0; i < part; ++i) out += args.parts[i].rows;
  return out;
}

glm_status encode_maps(glm_device* device, const glm_linear_args& args, int token_box, WideParams& p) {
  constexpr int kElement = sizeof(bf16);
  glm_status status = encode_map(device, "x", &p.x, args.x.data, args.rows, args.x.cols, args.x.stride, token_box);
  for (int i = 0; i < args.num_parts && status == GLM_OK; ++i) {
    const glm_weight& weight = args.parts[i];
    status = encode_map(device, "weights", &p.weights[i], weight.data, weight.rows, args.x.cols, weight.stride,
                        kWideChannels);
    if (status != GLM_OK) break;
    status = encode_map(device, "out", &p.out[i], part_output(args, i), args.rows, weight.rows * kElement,
                        args.out.stride * kElement, kChunkTokens);
  }
  return status;
}

template <bool kSegmented, int kChunks>
glm_status launch_wide(glm_device* device, const glm_linear_args& args) {
  WideParams p = {};
  p.linear = linear_params(args, kWideChannels);
  p.linear.k_bytes = args.x.cols;
  p.linear.split = split_of<Operand::kFp8Channel>(p.linear.tiling.first_channel[args.num_parts], p.linear.k_bytes);
  p.steps = (p.linear.k_bytes + kStepBytes - 1) / kStepBytes;
  p.linear.steps_per_block = (p.steps + p.linear.split - 1) / p.linear.split;
  p.channel_tiles = p.linear.tiling.first_tile[args.num_parts];
  p.token_tiles = static_cast<int>(blocks_for(args.rows, kChunks * kChunkTokens));
  p.cluster_tiles = static_cast<int>(blocks_for(p.channel_tiles, kWideCluster)) * p.token_tiles;
  const glm_status status = encode_maps(device, args, WidePipe<kChunks>::kTokenBox, p);
  if (status != GLM_OK) return status;
  const auto kernel = linear_wide_kernel<kSegmented, kChunks>;
  Grid grid{dim3(kWideCluster), kWideThreads, wide_shared_bytes(kChunks), kWideCluster};
  static const int clusters = resident_clusters(device, grid, kernel);
  grid.blocks.x *= static_cast<unsigned>(std::min(clusters, p.cluster_tiles));
  return launch(device, "linear", grid, kernel, p);
}

}  // namespace

namespace {

struct LinearBlocks {
  int64_t decode; /* of decode's tiles */
  int64_t split;  /* of linear_wide_split */
  int64_t tiles;  /* of kWideChannels */
  int split_of_k;
};

template <Operand kOperand>
LinearBlocks blocks_of(const glm_linear_args& args) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  int channels = 0;
  LinearBlocks blocks = {};
  for (int i = 0; i < args.num_parts; ++i) {
    channels += args.parts[i].rows;
    blocks.decode += blocks_for(args.parts[i].rows, kWgmmaChannels);
    blocks.tiles += blocks_for(args.parts[i].rows, kWideChannels);
  }
  constexpr int kDecodeTokens = 64;
  blocks.split_of_k = split_of<kOperand>(channels, args.x.cols * kElement);
  blocks.decode *= int64_t{blocks.split_of_k} * blocks_for(args.rows, kDecodeTokens);
  blocks.split = blocks.tiles * blocks.split_of_k * blocks_for(args.rows, kChunkTokens);
  return blocks;
}

/* Tensor copies can write the output, bf16. */
bool is_output_aligned(const glm_linear_args& args) {
  bool aligned = true;
  for (int i = 0; i < args.num_parts; ++i) {
    aligned = aligned && is_aligned_16(part_output(args, i), args.out.stride * static_cast<int64_t>(sizeof(bf16)));
  }
  return aligned;
}

}  // namespace

/* Decode's tiles are the fastest way as long as all of them run at once, two blocks a multiprocessor. */
bool is_wide(const glm_device* device, const glm_linear_args& args) {
  constexpr int kFp8From = 96; /* rows */
  constexpr int kBf16From = 129;
  if (!device->has_wgmma) return false;
  if (args.format == GLM_W_BF16) {
    return args.x.dtype == GLM_BF16 && args.rows >= kBf16From && is_aligned(args, 2) &&
           blocks_of<Operand::kBf16>(args).decode > 2 * device->sm_count;
  }
  return args.format == GLM_W_FP8_CHANNEL && args.out.dtype == GLM_BF16 && args.rows >= kFp8From &&
         is_aligned(args, 1) && is_output_aligned(args) &&
         blocks_of<Operand::kFp8Channel>(args).decode > 2 * device->sm_count;
}

glm_status linear_wide(glm_device* device, const glm_linear_args& args) {
  if (args.format == GLM_W_BF16) return linear_wide_split(device, args);
  const LinearBlocks blocks = blocks_of<Operand::kFp8Channel>(args);
  if (blocks.split_of_k > 1) {
    if (blocks.split <= device->sm_count) return linear_wide_split(device, args);
    return launch_wide<true, 1>(device, args); /* the sums of segments take the registers of a second chunk */
  }
  /* Chunks that the last block to end multiplies. */
  const auto chunks_in_turn = [&](int chunks) {
    return blocks_for(blocks.tiles * blocks_for(args.rows, chunks * kChunkTokens), device->sm_count) * chunks;
  };
  return chunks_in_turn(1) < chunks_in_turn(2) ? launch_wide<false, 1>(device, args)
                                               : launch_wide<false, 2>(device, args);
}

}  // namespace glm::cuda
