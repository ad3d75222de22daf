/* The expert layers of many tokens on Hopper: FP8 with a scale a channel, bf16 activations, on the tiles of prefill. */
#include "experts_pack.h"
#include "experts_tile.cuh"
#include "tensor_map.h"
#include "wide_tile.cuh"

namespace glm::cuda {

namespace {

constexpr int kChunks = 2;
constexpr int kTileTokens = kChunks * kChunkTokens;
using Pipe = WidePipe<kChunks, 1>;

struct WideExpertParams {
  ExpertParams layer;
  PackedExperts packed;
  CUtensorMap x;
};

/* Output channels of a block's tile: one warpgroup multiplies 64 of gate and the other those of up, or each 64 of down. */
template <ExpertLayer kLayer>
constexpr int kTileChannels = kLayer == ExpertLayer::kGateUp ? kWgmmaChannels : kWideChannels;

template <ExpertLayer kLayer>
using ClusterWalk = ExpertWalk<kTileChannels<kLayer> * kClusterChannels, kTileTokens>;

template <ExpertLayer kLayer>
__device__ __forceinline__ ClusterWalk<kLayer> cluster_walk(const ExpertParams& p) {
  return {p, p.in.offsets, static_cast<int>(blockIdx.x) / kClusterChannels,
          static_cast<int>(gridDim.x) / kClusterChannels};
}

/* This block's tile of the cluster's. */
template <ExpertLayer kLayer>
__device__ __forceinline__ ExpertTile own_tile(ExpertTile tile) {
  tile.channel += Pipe::cluster_channel() * kTileChannels<kLayer>;
  return tile;
}

/* First output channel of this warpgroup, and the weights that give it. */
struct GroupWeights {
  glm_weight weight;
  int channel;
};

template <ExpertLayer kLayer>
__device__ __forceinline__ GroupWeights group_weights(const ExpertParams& p, const ExpertTile& tile, int group) {
  if (kLayer == ExpertLayer::kDown) return {p.first.experts[tile.expert], tile.channel + group * kWgmmaChannels};
  return {(group == 0 ? p.first : p.second).experts[tile.expert], tile.channel};
}

template <ExpertLayer kLayer>
__device__ __forceinline__ void copy_tiles(const WideExpertParams& p, const Pipe& pipe) {
  const StepRange steps = p.layer.steps();
  Pipe::Place at;
  int acquired = -1;
  for (auto walk = cluster_walk<kLayer>(p.layer); walk.find(); walk.next()) {
    const ExpertTile tile = own_tile<kLayer>(walk.tile());
    const CUtensorMap* maps = p.packed.maps + tile.expert * 2;
    if (tile.expert != acquired) {
      acquire_map(maps);
      if (kLayer == ExpertLayer::kGateUp) acquire_map(maps + 1);
      acquired = tile.expert;
    }
    const auto copy_weights = [&](uint8_t* to, int column, uint64_t* full) {
      const bool paired = kLayer == ExpertLayer::kGateUp;
      copy_box(to, maps, column, tile.channel, full);
      copy_box(to + kExpertBox * kStepBytes, maps + (paired ? 1 : 0), column, tile.channel + (paired ? 0 : kExpertBox),
               full);
    };
    pipe.load(copy_weights, &p.x, tile.first, (tile.count + kChunkTokens - 1) / kChunkTokens, steps.last, at);
  }
}

/* By a warpgroup: eight channels of down's chunk a thread. */
__device__ __forceinline__ void store_down(const ExpertParams& p, const ExpertTile& tile, int chunk,
                                           const uint8_t* staged) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int channel = tile.channel + static_cast<int>(threadIdx.x) / kWarpgroup * kWgmmaChannels + thread % 8 * kPack;
  const int last = min(tile.count, (chunk + 1) * kChunkTokens);
  for (int i = chunk * kChunkTokens + thread / 8; i < last; i += kWarpgroup / 8) {
    const auto* from = reinterpret_cast<const bf16*>(staged + swizzled_offset(i % kChunkTokens, thread % 8));
    float values[kPack];
    load_pack(from, 0, kPack, values);
    const int channels = min(kPack, p.first.rows - channel);
    if (channels > 0) store_pack(row_of<bf16>(p.y, p.in.order[tile.first + i]) + channel, 0, channels, values);
  }
}

/* By both warpgroups: one staged gate, the other up. */
__device__ __forceinline__ void store_gate_up(const ExpertParams& p, const ExpertTile& tile, int chunk,
                                              const uint8_t* gate, const uint8_t* up) {
  const int thread = static_cast<int>(threadIdx.x);
  const int channel = tile.channel + thread % 8 * kPack;
  const int channels = min(kPack, p.first.rows - channel);
  const int last = min(tile.count, (chunk + 1) * kChunkTokens);
  for (int i = chunk * kChunkTokens + thread / 8; i < last && channels > 0; i += kWideGroups * kWarpgroup / 8) {
    const int at = swizzled_offset(i % kChunkTokens, thread % 8);
    float g[kPack];
    float u[kPack];
    load_pack(reinterpret_cast<const bf16*>(gate + at), 0, kPack, g);
    load_pack(reinterpret_cast<const bf16*>(up + at), 0, kPack, u);
#pragma unroll
    for (int j = 0; j < kPack; ++j) g[j] = to_float(swiglu<bf16>(g[j], u[j]));
    store_pack(row_of<bf16>(p.y, p.in.order[tile.first + i]) + channel, 0, channels, g);
  }
}

template <ExpertLayer kLayer>
__device__ __forceinline__ void multiply_tile(const ExpertParams& p, const ExpertTile& tile, const Pipe& pipe,
                                              float* row_scales, Pipe::Place& at) {
  const int thread = static_cast<int>(threadIdx.x);
  const int group = thread / kWarpgroup;
  const int64_t own_row = x_row(p.in, p.in.order[tile.first + min(thread, tile.count - 1)]);
  const float own_scale = *row_of<float>(p.in.x_scale, own_row);
  const GroupWeights weights = group_weights<kLayer>(p, tile, group);
  const int channel = weights.channel + thread % kWarpgroup / kWarp * 16 + thread % kWarp / 4;
  const int last = weights.weight.rows - 1;
  const float scales[2] = {weights.weight.scale[min(channel, last)], weights.weight.scale[min(channel + 8, last)]};
  WideSums<kChunks> sums;
  multiply_ragged(sums, pipe, tile.count, p.steps().last, at);
  row_scales[thread] = own_scale;
  named_barrier(kWideBarrier, kWideGroups * kWarpgroup);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kChunkTokens >= tile.count) continue;
    stage_chunk(sums[chunk], pipe.outputs(group), [&](float sum, int token, int row) {
      return sum * row_scales[chunk * kChunkTokens + token] * scales[row];
    });
    named_barrier(kWideBarrier, kWideGroups * kWarpgroup);
    if (kLayer == ExpertLayer::kGateUp) {
      store_gate_up(p, tile, chunk, pipe.outputs(0), pipe.outputs(1));
    } else {
      store_down(p, tile, chunk, pipe.outputs(group));
    }
    named_barrier(kWideBarrier, kWideGroups * kWarpgroup);
  }
}

template <ExpertLayer kLayer>
__global__ void __launch_bounds__(kWideThreads, 1) expert_wide_kernel(const __grid_constant__ WideExpertParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wide_stages(kChunks)> ring;
  __shared__ float row_scales[kTileTokens];
  begin_kernel();
  if (*p.packed.usable == 0) return;
  const Pipe pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  pipe.init();
  if (threadIdx.x >= kWideGroups * kWarpgroup) {
    leave_registers<kCopyRegisters>();
    if (threadIdx.x == kWideGroups * kWarpgroup) copy_tiles<kLayer>(p, pipe);
  } else {
    take_registers<kMultiplyRegisters>();
    give_first_turn();
    Pipe::Place at;
    for (auto walk = cluster_walk<kLayer>(p.layer); walk.find(); walk.next()) {
      multiply_tile<kLayer>(p.layer, own_tile<kLayer>(walk.tile()), pipe, row_scales, at);
    }
  }
  cluster_sync(); /* no block leaves while another still arrives at its barriers */
}

}  // namespace

template <ExpertLayer kLayer>
glm_status experts_wide(glm_device* device, const ExpertParams& layer, int64_t assignments,
                        const PackedExperts& packed) {
  WideExpertParams p = {layer, packed, {}};
  p.layer.k_bytes = layer.in.x.cols;
  const glm_status status =
      encode_map(device, &p.x, packed.x, assignments, layer.in.x.cols, layer.in.x.cols, Pipe::kTokenBox);
  if (status != GLM_OK) return status;
  const auto kernel = expert_wide_kernel<kLayer>;
  Grid grid{dim3(kClusterChannels), kWideThreads, wide_shared_bytes(kChunks), kClusterChannels};
  static const int clusters = resident_clusters(device, grid, kernel);
  grid.blocks.x *= static_cast<unsigned>(clusters);
  return launch(device, "moe (wide)", grid, kernel, p);
}

template glm_status experts_wide<ExpertLayer::kGateUp>(glm_device*, const ExpertParams&, int64_t, const PackedExperts&);
template glm_status experts_wide<ExpertLayer::kDown>(glm_device*, const ExpertParams&, int64_t, const PackedExperts&);

}  // namespace glm::cuda
