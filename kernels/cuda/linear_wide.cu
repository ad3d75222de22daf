/* Linear layers of many tokens on Hopper: FP8 with a scale a channel, bf16 output. */
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
  CUtensorMap x;
  CUtensorMap weights[GLM_MAX_PARTS];
};

/* Rows of a tile's weights that one block copies. */
template <int kClusterTokens>
constexpr int kWeightBox = kWideChannels / kClusterTokens;

struct WideTile {
  int part; /* -1: past the last tile of channels */
  int channel;
  int token;
};

/* A cluster's tiles cover kClusterChannels by kClusterTokens. Blocks that run at once share as few channels and tokens as possible: they
 * walk bands of kBand clusters of tokens. */
template <typename Pipe, int kChunks, int kClusterTokens>
__device__ __forceinline__ WideTile wide_tile(const WideParams& p, int index) {
  constexpr int kBand = 8 / kClusterTokens;
  const int across = (p.channel_tiles + kClusterChannels - 1) / kClusterChannels;
  const int down = (p.token_tiles + kClusterTokens - 1) / kClusterTokens;
  const int band = index / (kBand * across);
  const int height = min(kBand, down - band * kBand);
  const int within = index - band * kBand * across;
  const int tile = within / height * kClusterChannels + Pipe::cluster_channel();
  const int token_tile = (band * kBand + within % height) * kClusterTokens + Pipe::cluster_token();
  const int token = token_tile * kChunks * kChunkTokens;
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

/* Eight channels of a token. */
__device__ __forceinline__ void store_staged(bf16* to, int count, const uint8_t* staged) {
  const uint4 values = *reinterpret_cast<const uint4*>(staged);
  if (count >= kPack && reinterpret_cast<uintptr_t>(to) % sizeof(values) == 0) {
    *reinterpret_cast<uint4*>(to) = values;
    return;
  }
  const bf16* from = reinterpret_cast<const bf16*>(&values);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if (i < count) to[i] = from[i];
  }
}

/* By a warpgroup: its staged chunk to the output. */
__device__ __forceinline__ void store_chunk(const LinearParams& p, const WideTile& tile, int token,
                                            const uint8_t* staged) {
  if (tile.part < 0) return;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int channel = tile.channel + static_cast<int>(threadIdx.x) / kWarpgroup * kWgmmaChannels + thread % 8 * kPack;
  const int count = p.parts[tile.part].rows - channel;
  const int column = p.tiling.first_channel[tile.part] + channel;
  for (int i = thread / 8; i < kChunkTokens && token + i < p.rows && count > 0; i += kWarpgroup / 8) {
    store_staged(row_of<bf16>(p.out, token + i) + column, count, staged + swizzled_offset(i, thread % 8));
  }
}

template <int kChunks, bool kSegmented, int kClusterTokens>
__device__ __forceinline__ void multiply_and_store(const WideParams& p, const WideTile& tile,
                                                   const WidePipe<kChunks, kClusterTokens>& pipe, float* row_scales,
                                                   typename WidePipe<kChunks, kClusterTokens>::Place& at) {
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  const int thread = static_cast<int>(threadIdx.x);
  const float own_scale = *row_of<float>(p.linear.x_scale, min(tile.token + thread, p.linear.rows - 1));
  const WideEpilogue epilogue = wide_epilogue(p.linear, tile);
  const int steps = (p.linear.k_bytes + kStepBytes - 1) / kStepBytes;
  WideSums<kChunks> sums;
  multiply_wide<kSegmented>(sums, pipe, steps, p.linear.steps_per_block, at);
  if (thread < kChunks * kChunkTokens) row_scales[thread] = own_scale;
  named_barrier(kWideBarrier, kWideGroups * kWarpgroup);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float* scales = row_scales + chunk * kChunkTokens;
    stage_chunk(sums[chunk], pipe.outputs(group), [&](float sum, int token, int row) {
      return sum * scales[token] * epilogue.scale[row] + epilogue.bias[row];
    });
    named_barrier(kGroupBarrier + group, kWarpgroup);
    store_chunk(p.linear, tile, tile.token + chunk * kChunkTokens, pipe.outputs(group));
    named_barrier(kGroupBarrier + group, kWarpgroup);
  }
  named_barrier(kWideBarrier, kWideGroups * kWarpgroup); /* the scales have been read */
}

template <int kChunks, bool kSegmented, int kClusterTokens>
__global__ void __launch_bounds__(kWideThreads, 1) linear_wide_kernel(const __grid_constant__ WideParams p) {
  using Pipe = WidePipe<kChunks, kClusterTokens>;
  constexpr int kCluster = kClusterChannels * kClusterTokens;
  extern __shared__ uint4 shared[];
  __shared__ Ring<wide_stages(kChunks)> ring;
  __shared__ float row_scales[kChunks * kChunkTokens];
  begin_kernel();
  const Pipe pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  pipe.init();
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const int cluster = static_cast<int>(blockIdx.x) / kCluster;
  typename Pipe::Place at;
  if (threadIdx.x >= kWideGroups * kWarpgroup) {
    leave_registers<kCopyRegisters>();
    if (threadIdx.x == kWideGroups * kWarpgroup) {
      const int steps = (p.linear.k_bytes + kStepBytes - 1) / kStepBytes;
      for (int index = cluster; index < p.cluster_tiles; index += clusters) {
        const WideTile tile = wide_tile<Pipe, kChunks, kClusterTokens>(p, index);
        const CUtensorMap* map = &p.weights[max(tile.part, 0)];
        const auto copy_weights = [&](uint8_t* to, int column, uint64_t* full) {
          const int row = Pipe::cluster_token() * kWeightBox<kClusterTokens>;
          copy_box(to + row * kStepBytes, map, column, tile.channel + row, full, Pipe::same_channels());
        };
        pipe.load(copy_weights, &p.x, tile.token, kChunks, steps, at);
      }
    }
  } else {
    take_registers<kMultiplyRegisters>();
    give_first_turn();
    for (int index = cluster; index < p.cluster_tiles; index += clusters) {
      const WideTile tile = wide_tile<Pipe, kChunks, kClusterTokens>(p, index);
      multiply_and_store<kChunks, kSegmented>(p, tile, pipe, row_scales, at);
    }
  }
  cluster_sync(); /* no block leaves while another still arrives at its barriers */
}

glm_status encode_maps(glm_device* device, const glm_linear_args& args, int token_box, int weight_box, WideParams& p) {
  glm_status status = encode_map(device, &p.x, args.x.data, args.rows, args.x.cols, args.x.stride, token_box);
  for (int i = 0; i < args.num_parts && status == GLM_OK; ++i) {
    const glm_weight& weight = args.parts[i];
    status = encode_map(device, &p.weights[i], weight.data, weight.rows, args.x.cols, weight.stride, weight_box);
  }
  return status;
}

template <int kChunks, bool kSegmented, int kClusterTokens>
glm_status launch_wide(glm_device* device, const glm_linear_args& args) {
  using Pipe = WidePipe<kChunks, kClusterTokens>;
  constexpr int kCluster = kClusterChannels * kClusterTokens;
  WideParams p = {};
  p.linear = linear_params(args, kWideChannels);
  p.linear.k_bytes = args.x.cols;
  p.linear.split = split_of(p.linear.tiling.first_channel[args.num_parts], p.linear.k_bytes);
  const int steps = (p.linear.k_bytes + kStepBytes - 1) / kStepBytes;
  p.linear.steps_per_block = (steps + p.linear.split - 1) / p.linear.split;
  p.channel_tiles = p.linear.tiling.first_tile[args.num_parts];
  p.token_tiles = static_cast<int>(blocks_for(args.rows, kChunks * kChunkTokens));
  p.cluster_tiles =
      static_cast<int>(blocks_for(p.channel_tiles, kClusterChannels) * blocks_for(p.token_tiles, kClusterTokens));
  const glm_status status = encode_maps(device, args, Pipe::kTokenBox, kWeightBox<kClusterTokens>, p);
  if (status != GLM_OK) return status;
  const auto kernel = linear_wide_kernel<kChunks, kSegmented, kClusterTokens>;
  Grid grid{dim3(kCluster), kWideThreads, wide_shared_bytes(kChunks), kCluster};
  static const int clusters = resident_clusters(device, grid, kernel);
  grid.blocks.x *= static_cast<unsigned>(clusters);
  return launch(device, "linear", grid, kernel, p);
}

}  // namespace

bool is_wide(const glm_linear_args& args) {
  constexpr int kWideFrom = 256; /* rows */
  return args.rows >= kWideFrom && args.format == GLM_W_FP8_CHANNEL && is_aligned(args, 1);
}

glm_status linear_wide(glm_device* device, const glm_linear_args& args) {
  int channels = 0;
  for (int i = 0; i < args.num_parts; ++i) channels += args.parts[i].rows;
  /* The sums of segments take the registers of a second chunk. */
  return split_of(channels, args.x.cols) > 1 ? launch_wide<1, true, 2>(device, args)
                                             : launch_wide<2, false, 1>(device, args);
}

}  // namespace glm::cuda
