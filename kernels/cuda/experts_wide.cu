/* The expert layers of many tokens on Hopper: FP8 with a scale a channel, bf16 activations, on the tiles of prefill. */
#include "experts_pack.h"
#include "experts_walk.cuh"
#include "tensor_map.h"
#include "wide_tile.cuh"

namespace glm::cuda {

namespace {

constexpr int kChunks = 2;
constexpr int kTileTokens = kChunks * kChunkTokens;
using Pipe = WidePipe<kChunks>;

struct WideExpertParams {
  ExpertParams layer;
  PackedExperts packed;
  CUtensorMap x;
};

/* Output channels of a block's tile: one warpgroup multiplies 64 of gate and the other those of up, or each 64 of down. */
template <ExpertLayer kLayer>
constexpr int kTileChannels = kLayer == ExpertLayer::kGateUp ? kWgmmaChannels : kWideChannels;

template <ExpertLayer kLayer>
using ClusterWalk = ExpertWalk<kTileChannels<kLayer> * kWideCluster, kTileTokens>;

template <ExpertLayer kLayer>
__device__ __forceinline__ ClusterWalk<kLayer> cluster_walk(const ExpertParams& p) {
  return {p, p.in.offsets, static_cast<int>(blockIdx.x) / kWideCluster, static_cast<int>(gridDim.x) / kWideCluster};
}

/* This block's tile of the cluster's. */
template <ExpertLayer kLayer>
__device__ __forceinline__ ExpertTile own_tile(ExpertTile tile) {
  tile.channel += static_cast<int>(cluster_rank()) * kTileChannels<kLayer>;
  return tile;
}

__device__ __forceinline__ int chunks_of(const ExpertTile& tile) {
  return (tile.count + kChunkTokens - 1) / kChunkTokens;
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
__device__ __forceinline__ void copy_tile(const WideExpertParams& p, const ExpertTile& tile, const Pipe& pipe,
                                          int& acquired, Pipe::Place& at) {
  constexpr bool kPaired = kLayer == ExpertLayer::kGateUp;
  const CUtensorMap* maps = p.packed.maps + tile.expert * 2;
  if (tile.expert != acquired) {
    acquire_map(maps);
    if (kPaired) acquire_map(maps + 1);
    acquired = tile.expert;
  }
  const auto copy_weights = [&](uint8_t* to, int column, uint64_t* full) {
    copy_box(to, maps, column, tile.channel, full);
    if (kPaired) copy_box(to + kExpertBox<kLayer> * kStepBytes, maps + 1, column, tile.channel, full);
  };
  pipe.load(copy_weights, &p.x, tile.first, chunks_of(tile), p.layer.steps().last, at);
}

/* rounded_to<bf16>(silu(x)) of eight values. The quotient is the sequence that `/` takes for operands which are neither tiny nor huge, so that
 * the eight run side by side; a pack with any other value takes `/`. */
__device__ __forceinline__ void silu_pack(float values[kPack]) {
  float quotients[kPack];
  bool ordinary = true;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const float x = values[i];
    const float divisor = 1.0f + expf(-x);
    ordinary = ordinary && fabsf(x) > 0x1p-90f && fabsf(x) < 0x1p90f && divisor < 0x1p90f;
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(divisor));
    reciprocal = fmaf(reciprocal, fmaf(-divisor, reciprocal, 1.0f), reciprocal);
    quotients[i] = divide_by(x, divisor, reciprocal);
  }
  if (!ordinary) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = silu(values[i]);
#pragma unroll
    for (int i = 0; i < kPack; ++i) quotients[i] = values[i];
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) values[i] = quotients[i];
  round_pack<bf16>(values);
}

/* Eight staged channels: of down, or gate and up made one. */
template <ExpertLayer kLayer>
__device__ __forceinline__ uint4 load_staged(const Pipe& pipe, int chunk, int token, int pack) {
  constexpr int kGroupPacks = kWgmmaChannels / kPack;
  const int at = swizzled_offset(token, pack % kGroupPacks);
  const uint4 staged = *reinterpret_cast<const uint4*>(pipe.outputs(chunk, pack / kGroupPacks) + at);
  if constexpr (kLayer == ExpertLayer::kDown) return staged;
  const uint4 other = *reinterpret_cast<const uint4*>(pipe.outputs(chunk, 1) + at);
  const auto* gate = reinterpret_cast<const __nv_bfloat162*>(&staged);
  const auto* up = reinterpret_cast<const __nv_bfloat162*>(&other);
  float values[kPack];
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) values[2 * i] = __low2float(gate[i]), values[2 * i + 1] = __high2float(gate[i]);
  silu_pack(values);
  uint32_t y[kPack / 2];
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    y[i] = pack_bf16(values[2 * i] * __low2float(up[i]), values[2 * i + 1] * __high2float(up[i]));
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

__device__ __forceinline__ void store_channels(bf16* to, int count, const uint4& values) {
  if (count >= kPack && reinterpret_cast<uintptr_t>(to) % sizeof(values) == 0) {
    __stcg(reinterpret_cast<uint4*>(to), values);
    return;
  }
  const bf16* from = reinterpret_cast<const bf16*>(&values);
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if (i < count) to[i] = from[i];
  }
}

/* Where the rows of a chunk go; the next chunk's are found while it is stored. */
struct StoreTable {
  bf16* rows[2][kChunkTokens];
};

/* By the storing warps: the staged chunks of a tile. */
template <ExpertLayer kLayer>
__device__ __forceinline__ void store_tile(const WideExpertParams& p, const ExpertTile& tile, const Pipe& pipe,
                                           StoreTable& table, int& turn) {
  constexpr int kPacks = kTileChannels<kLayer> / kPack;
  constexpr int kAtOnce = kLayer == ExpertLayer::kDown ? 3 : 1;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup - kWarp;
  for (int chunk = 0; chunk < chunks_of(tile); ++chunk) {
    bf16** rows = table.rows[turn];
    turn ^= 1;
    const int first = tile.first + chunk * kChunkTokens;
    const int last = min(kChunkTokens, tile.first + tile.count - first);
    for (int i = thread; i < last; i += kStoreThreads) rows[i] = p.packed.outputs[first + i] + tile.channel;
    wait_for_staged(chunk);
    for (int begin = thread; begin < last * kPacks; begin += kAtOnce * kStoreThreads) {
      uint4 values[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = begin + j * kStoreThreads;
        if (i < last * kPacks) values[j] = load_staged<kLayer>(pipe, chunk, i / kPacks, i % kPacks);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = begin + j * kStoreThreads;
        const int channel = i % kPacks * kPack;
        if (i < last * kPacks) {
          store_channels(rows[i / kPacks] + channel, p.layer.first.rows - tile.channel - channel, values[j]);
        }
      }
    }
    give_room(chunk);
  }
}

template <ExpertLayer kLayer>
__device__ __forceinline__ void multiply_and_stage(const ExpertParams& p, const ExpertTile& tile, const Pipe& pipe,
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
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= chunks_of(tile)) continue;
    wait_for_room(chunk);
    if (chunk == 0) {
      row_scales[thread] = own_scale;
      named_barrier(kWideBarrier, kMultiplyThreads);
    }
    stage_chunk(sums[chunk], pipe.outputs(chunk, group), [&](float sum, int token, int row) {
      return sum * row_scales[chunk * kChunkTokens + token] * scales[row];
    });
    hand_over(chunk);
  }
}

/* What a block has in shared memory where weights are not aligned, and decode's tiles run. */
struct UnalignedTables {
  Ring<wgmma_stages(kExpertTokens)> ring;
  ExpertTables<kExpertTokens> tables;
};
constexpr int kUnalignedStageBytes = wgmma_stages(kExpertTokens) * wgmma_stage_bytes(kExpertTokens);
static_assert(kSwizzleAlignment + kUnalignedStageBytes + sizeof(UnalignedTables) <= wide_shared_bytes(kChunks));

template <ExpertLayer kLayer>
__device__ __forceinline__ void walk_unaligned(const ExpertParams& p, uint8_t* stages) {
  auto& shared = *reinterpret_cast<UnalignedTables*>(stages + kUnalignedStageBytes);
  const WgmmaPipe<kExpertTokens> pipe{&shared.ring, stages};
  pipe.init();
  if (threadIdx.x >= kWgmmaThreads) return;
  walk_experts<kLayer, Operand::kFp8Channel>(p, {p.in.offsets, p.in.order}, pipe, shared.tables);
}

template <ExpertLayer kLayer>
__global__ void __launch_bounds__(kWideThreads, 1) expert_wide_kernel(const __grid_constant__ WideExpertParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wide_stages(kChunks)> ring;
  __shared__ float row_scales[kTileTokens];
  __shared__ StoreTable table;
  wait_for_predecessor();
  release_successor(); /* which so knows that the grouping is over (ExpertParams::settled) */
  uint8_t* const stages = swizzle_aligned(reinterpret_cast<uint8_t*>(shared));
  if (*p.packed.usable == 0) return walk_unaligned<kLayer>(p.layer, stages);
  const Pipe pipe{&ring, stages};
  pipe.init();
  const auto for_each_tile = [&](auto&& f) {
    for (auto walk = cluster_walk<kLayer>(p.layer); walk.find(); walk.next()) f(own_tile<kLayer>(walk.tile()));
  };
  Pipe::Place at;
  const WideRole role = wide_role();
  if (role == WideRole::kMultiply) {
    take_registers<kMultiplyRegisters>();
    for_each_tile([&](const ExpertTile& tile) { multiply_and_stage<kLayer>(p.layer, tile, pipe, row_scales, at); });
  } else {
    leave_registers<kCopyRegisters>();
    int acquired = -1;
    if (role == WideRole::kCopy) {
      for_each_tile([&](const ExpertTile& tile) { copy_tile<kLayer>(p, tile, pipe, acquired, at); });
    }
    if (role == WideRole::kStore) {
      int turn = 0;
      for (int chunk = 0; chunk < kChunks; ++chunk) give_room(chunk);
      for_each_tile([&](const ExpertTile& tile) { store_tile<kLayer>(p, tile, pipe, table, turn); });
    }
  }
  cluster_sync(); /* no block leaves while the other still arrives at its barriers */
}

}  // namespace

template <ExpertLayer kLayer>
glm_status experts_wide(glm_device* device, const ExpertParams& layer, int64_t assignments,
                        const PackedExperts& packed) {
  WideExpertParams p = {layer, packed, {}};
  p.layer.k_bytes = layer.in.x.cols;
  p.layer.tokens_aligned = true;
  device->settled_offsets = kLayer == ExpertLayer::kGateUp ? layer.in.offsets : nullptr;
  const glm_status status = encode_map(device, "packed tokens", &p.x, packed.x, assignments, layer.in.x.cols,
                                       layer.in.x.cols, Pipe::kTokenBox);
  if (status != GLM_OK) return status;
  const auto kernel = expert_wide_kernel<kLayer>;
  Grid grid{dim3(kWideCluster), kWideThreads, wide_shared_bytes(kChunks), kWideCluster};
  static const int clusters = resident_clusters(device, grid, kernel);
  grid.blocks.x *= static_cast<unsigned>(clusters);
  return launch(device, "moe (wide)", grid, kernel, p);
}

template glm_status experts_wide<ExpertLayer::kGateUp>(glm_device*, const ExpertParams&, int64_t, const PackedExperts&);
template glm_status experts_wide<ExpertLayer::kDown>(glm_device*, const ExpertParams&, int64_t, const PackedExperts&);

}  // namespace glm::cuda
