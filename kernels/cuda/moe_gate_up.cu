#include "experts_pack.h"
#include "ops.h"
#include "row.cuh"
#include "whole_row.cuh"

namespace glm::cuda {

namespace {

constexpr int kInnerChannels = kExpertChannels / 2; /* of a tile: as many of gate as of up */

struct GateUpParams {
  ExpertInputs in;
  glm_expert_weights gate;
  glm_expert_weights up;
  glm_tensor y; /* act [rows * top_k][intermediate] */
};

/* Of a warp's two mma tiles one holds gate channels, the other the same channels of up. */
template <Operand kOperand>
__device__ __forceinline__ void find_gate_up_rows(const glm_weight& gate, const glm_weight& up, int first,
                                                  TileInputs& in) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp % kExpertWarpsN;
  const int row = first + warp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    set_weight_row<kOperand>(gate, row + i * 8, i, in);
    set_weight_row<kOperand>(up, row + i * 8, i + 2, in);
  }
}

/* A thread stores eight channels of every kTurn-th token. */
template <Operand kOperand, typename Act>
__device__ __forceinline__ void store_gate_up(const GateUpParams& p, const ChannelScales& gate, const ChannelScales& up,
                                              const ExpertTokens& tokens, int first, int count, const float* partials) {
  constexpr int kGroups = kInnerChannels / kPack;
  const int inner = static_cast<int>(threadIdx.x) % kGroups * kPack;
  const int channels = min(kPack, p.gate.rows - first - inner);
  if (channels <= 0) return;
  for (int token = static_cast<int>(threadIdx.x) / kGroups; token < count; token += kExpertThreads / kGroups) {
    const float* sums = partials + token * kPartialPitch<kExpertWarpsN> + inner / 16 * 32 + inner % 16;
    const ChannelSums g = load_sums(sums);
    const ChannelSums u = load_sums(sums + 16);
    float y[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float scale = tokens.row_scales[token];
      const bool scaled = kOperand == Operand::kFp8Channel;
      y[i] = to_float(swiglu<Act>(scaled ? g.values[i] * scale * gate.values[i] : g.values[i],
                                  scaled ? u.values[i] * scale * up.values[i] : u.values[i]));
    }
    store_pack(row_of<Act>(p.y, tokens.assignments[token]) + first + inner, 0, channels, y);
  }
}

/* Block (x, y, z): channels, expert, tokens. */
template <Operand kOperand, typename Act>
__global__ void __launch_bounds__(kExpertThreads, 2) gate_up_kernel(const __grid_constant__ GateUpParams p) {
  extern __shared__ uint4 shared[];
  __shared__ ExpertTokens tokens;
  const glm_weight gate = p.gate.experts[blockIdx.y];
  const glm_weight up = p.up.experts[blockIdx.y];
  begin_kernel();
  const int begin = p.in.offsets[blockIdx.y];
  const int end = p.in.offsets[blockIdx.y + 1];
  const int first_channel = static_cast<int>(blockIdx.x) * kInnerChannels;
  if (begin == end) return;
  const bool aligned =
      are_tokens_aligned<kOperand>(p.in) && is_weight_aligned<kOperand>(gate) && is_weight_aligned<kOperand>(up);
  const int own_channel = first_channel + static_cast<int>(threadIdx.x) % (kInnerChannels / kPack) * kPack;
  const ChannelScales gate_scales = load_scales<kOperand>(gate, own_channel);
  const ChannelScales up_scales = load_scales<kOperand>(up, own_channel);
  const int step = tile_tokens(aligned);
  for (int first = begin + static_cast<int>(blockIdx.z) * step; first < end;
       first += static_cast<int>(gridDim.z) * step) {
    const int count = min(step, end - first);
    TileInputs tile = expert_tile_inputs<kOperand>(p.in, tokens);
    find_gate_up_rows<kOperand>(gate, up, first_channel, tile);
    multiply_expert_tile<kOperand>(tile, aligned, count, reinterpret_cast<uint8_t*>(shared),
                                   [&] { find_expert_tokens<kOperand>(p.in, first, count, tokens); });
    store_gate_up<kOperand, Act>(p, gate_scales, up_scales, tokens, first_channel, count,
                                 reinterpret_cast<const float*>(shared));
    __syncthreads();
  }
}

template <typename Act, typename W>
__global__ void gate_up_scalar_kernel(const __grid_constant__ GateUpParams p) {
  begin_kernel();
  const int end = p.in.offsets[blockIdx.y + 1];
  const int channel = static_cast<int>(blockIdx.x) * kDotWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (channel >= p.gate.rows) return;
  const glm_weight gate = p.gate.experts[blockIdx.y];
  const glm_weight up = p.up.experts[blockIdx.y];
  for (int first = p.in.offsets[blockIdx.y] + static_cast<int>(blockIdx.z) * kDotTokens; first < end;
       first += static_cast<int>(gridDim.z) * kDotTokens) {
    const Act* x[kDotTokens];
    int32_t assignments[kDotTokens];
    const int count = find_dot_tokens(p.in, first, end, x, assignments);
    float g[kDotTokens];
    float u[kDotTokens];
    warp_dots(static_cast<const W*>(gate.data) + channel * gate.stride, x, p.in.x.cols, g);
    warp_dots(static_cast<const W*>(up.data) + channel * up.stride, x, p.in.x.cols, u);
    if (threadIdx.x % kWarp != 0) continue;
    for (int i = 0; i < count; ++i) row_of<Act>(p.y, assignments[i])[channel] = swiglu<Act>(g[i], u[i]);
  }
}

/* The assignments that the order lists. */
struct Listed {
  const int32_t* total;
  const int32_t* order;
  bool settled; /* both are there before the predecessor ends */
};

/* Calls f with every gridDim.x-th of them, once the predecessor has ended. */
template <typename F>
__device__ __forceinline__ void for_each_listed(const Listed& listed, F&& f) {
  release_successor();
  if (!listed.settled) wait_for_predecessor();
  const int first = static_cast<int>(blockIdx.x);
  const int count = __ldcg(listed.total);
  int64_t index = first < count ? __ldcg(listed.order + first) : 0;
  wait_for_predecessor();
  for (int i = first; i < count; i += static_cast<int>(gridDim.x)) {
    const int next = i + static_cast<int>(gridDim.x);
    const int64_t following = next < count ? __ldcg(listed.order + next) : 0;
    f(index);
    index = following;
  }
}

template <typename Act>
__global__ void quantize_listed_kernel(Listed listed, glm_tensor y, RowTargets targets) {
  extern __shared__ __align__(16) float row_memory[];
  __shared__ uint32_t largest[kWarp];
  BlockRow row(row_memory, y.cols);
  for_each_listed(listed, [&](int64_t index) {
    const Act* from = row_of<Act>(y, index);
    store_row<Act>(row, y.cols, targets, index, largest,
                   [&](int32_t first, float* values) { load_pack(from, first, y.cols, values); });
  });
}

/* The same for whole packs of bf16, kEach in a thread. */
template <int kEach>
__global__ void quantize_listed_whole_kernel(Listed listed, glm_tensor y, RowTargets targets) {
  __shared__ uint32_t largest[2][kWarp]; /* by turns: a row ends while others still read the last one's */
  int turn = 0;
  for_each_listed(listed, [&](int64_t index) {
    const bf16* const from = row_of<bf16>(y, index);
    Packed packs[kEach];
    for_each_whole<kEach>(y.cols, [&](int j, int32_t column) { packs[j] = load_packed(from + column); });
    store_whole_row<kEach>(y.cols, targets, index, largest[turn], [&](int j, int32_t) { return packs[j]; });
    turn ^= 1;
  });
}

ExpertInputs inputs_of(const glm_moe_gate_up_args& args) {
  return {args.x, args.x_scale, args.offsets, args.order, args.top_k, true};
}

/* Of the outputs, where they are only quantised. */
size_t y_bytes(const glm_moe_gate_up_args& args) {
  if (args.out.data != nullptr) return 0;
  return static_cast<size_t>(args.rows) * args.top_k * args.gate.rows * bytes_of(args.out.dtype);
}

/* And the ids, which it may list by itself. */
Touched touched_by(const glm_device* device, const glm_moe_gate_up_args& args) {
  const int64_t assignments = int64_t{args.rows} * args.top_k;
  Touched touched;
  touched.reads(args.x, args.rows).reads(args.x_scale, args.rows).reads(device->last_grouping.ids, args.rows);
  touched.reads(args.offsets, (args.gate.count + size_t{1}) * sizeof(int32_t));
  touched.reads(args.order, assignments * sizeof(int32_t));
  touched.writes(args.out, assignments).writes(args.q, assignments).writes(args.scale, assignments);
  return touched.writes(device->workspace, moe_gate_up_workspace(&args));
}

}  // namespace

size_t moe_gate_up_workspace(const glm_moe_gate_up_args* args) {
  if (!is_packed(inputs_of(*args), args->gate.format, args->out.dtype, args->rows)) return y_bytes(*args);
  return y_bytes(*args) + packed_bytes(static_cast<int64_t>(args->rows) * args->top_k, args->x.cols, args->gate.count);
}

glm_status moe_gate_up(glm_device* device, const glm_moe_gate_up_args* args) {
  const LineOfCall line(device, touched_by(device, *args));
  const glm_dtype act_dtype = args->out.dtype; /* also where `out` itself is absent */
  GateUpParams p = {};
  p.in = inputs_of(*args);
  p.gate = args->gate;
  p.up = args->up;
  p.y = args->out.data != nullptr ? args->out
                                  : glm_tensor{device->workspace, act_dtype, args->gate.rows, args->gate.rows};
  const auto experts = static_cast<unsigned>(args->gate.count);
  return with_act(act_dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    const auto on_tensor_cores = [&](auto operand) {
      if (device->has_wgmma && act_dtype == GLM_BF16) {
        const ExpertParams on_wgmma{p.in, p.gate, p.up, p.y};
        return experts_on_hopper<ExpertLayer::kGateUp, operand()>(device, on_wgmma, args->rows,
                                                                  device->workspace + y_bytes(*args));
      }
      const Grid grid{
          dim3(blocks_for(args->gate.rows, kInnerChannels), experts, token_blocks(args->rows, kExpertTokens)),
          kExpertThreads, kExpertSharedBytes};
      return launch(device, "moe_gate_up", grid, gate_up_kernel<operand(), Act>, p);
    };
    const auto scalar = [&] {
      return with_weight(args->gate.format, [&](auto weight) {
        using W = typename decltype(weight)::type;
        const Grid grid{dim3(blocks_for(args->gate.rows, kDotWarps), experts, token_blocks(args->rows, kDotTokens)),
                        kDotWarps * kWarp};
        return launch(device, "moe_gate_up", grid, gate_up_scalar_kernel<Act, W>, p);
      });
    };
    const glm_status status = with_operand(args->gate.format, args->x.dtype, on_tensor_cores, scalar);
    if (status != GLM_OK || args->q.data == nullptr) return status;
    constexpr int kBlocksPerMultiprocessor = 32;
    const int blocks = std::min(args->rows * args->top_k, device->sm_count * kBlocksPerMultiprocessor);
    const Grid grid{dim3(static_cast<unsigned>(blocks)), row_threads(p.y.cols), shared_row_bytes(p.y.cols)};
    const Listed listed{args->offsets + args->gate.count, args->order, device->settled_offsets == args->offsets};
    const RowTargets targets{{}, args->q, args->scale};
    if (act_dtype == GLM_BF16 && has_whole_packs(p.y, p.y.cols) && takes_whole_rows(targets, p.y.cols)) {
      return with_each(args->rows, grid.threads, [&](auto each) {
        const Grid whole{grid.blocks, grid.threads / each()};
        return launch(device, "moe_gate_up (quantise)", whole, quantize_listed_whole_kernel<each()>, listed, p.y,
                      targets);
      });
    }
    return launch(device, "moe_gate_up (quantise)", grid, quantize_listed_kernel<Act>, listed, p.y, targets);
  });
}

}  // namespace glm::cuda
