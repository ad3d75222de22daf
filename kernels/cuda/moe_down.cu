#include "experts_pack.h"
#include "moe_combine.cuh"
#include "ops.h"
#include "row.cuh"

namespace glm::cuda {

namespace {

struct DownParams {
  ExpertInputs in;
  glm_expert_weights down;
  glm_tensor y; /* act [rows * top_k][hidden]: each assignment's expert output */
  ProductRanks ranks = {};
};

template <Operand kOperand, typename Act>
__device__ __forceinline__ void store_down(const DownParams& p, const ChannelScales& scales, const ExpertTokens& tokens,
                                           int first, int count, const float* partials) {
  constexpr int kGroups = kExpertChannels / kPack;
  const int own = static_cast<int>(threadIdx.x) % kGroups * kPack;
  const int channels = min(kPack, p.down.rows - first - own);
  if (channels <= 0) return;
  for (int token = static_cast<int>(threadIdx.x) / kGroups; token < count; token += kExpertThreads / kGroups) {
    ChannelSums sums = load_sums(partials + token * kPartialPitch<kExpertWarpsN> + own);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (kOperand == Operand::kFp8Channel)
        sums.values[i] = sums.values[i] * tokens.row_scales[token] * scales.values[i];
    }
    store_pack(product_row<Act>(p.y, p.ranks, p.in.top_k, tokens.assignments[token]) + first + own, 0, channels,
               sums.values);
  }
}

/* Block (x, y, z): channels, expert, tokens. */
template <Operand kOperand, typename Act>
__global__ void __launch_bounds__(kExpertThreads, 2) down_kernel(const __grid_constant__ DownParams p) {
  extern __shared__ uint4 shared[];
  __shared__ ExpertTokens tokens;
  const glm_weight down = p.down.experts[blockIdx.y];
  begin_kernel();
  const int begin = p.in.offsets[blockIdx.y];
  const int end = p.in.offsets[blockIdx.y + 1];
  const int first_channel = static_cast<int>(blockIdx.x) * kExpertChannels;
  const int row = first_channel + static_cast<int>(threadIdx.x) / kWarp % kExpertWarpsN * 16 * kRowTiles +
                  static_cast<int>(threadIdx.x) % kWarp / 4;
  if (begin == end) return;
  const bool aligned = are_tokens_aligned<kOperand>(p.in) && is_weight_aligned<kOperand>(down);
  const int own_channel = first_channel + static_cast<int>(threadIdx.x) % (kExpertChannels / kPack) * kPack;
  const ChannelScales scales = load_scales<kOperand>(down, own_channel);
  const int step = tile_tokens(aligned);
  for (int first = begin + static_cast<int>(blockIdx.z) * step; first < end;
       first += static_cast<int>(gridDim.z) * step) {
    const int count = min(step, end - first);
    TileInputs tile = expert_tile_inputs<kOperand>(p.in, tokens);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) set_weight_row<kOperand>(down, row + i * 8, i, tile);
    multiply_expert_tile<kOperand>(tile, aligned, count, reinterpret_cast<uint8_t*>(shared),
                                   [&] { find_expert_tokens<kOperand>(p.in, first, count, tokens); });
    store_down<kOperand, Act>(p, scales, tokens, first_channel, count, reinterpret_cast<const float*>(shared));
    __syncthreads();
  }
}

template <typename Act, typename W>
__global__ void down_scalar_kernel(const __grid_constant__ DownParams p) {
  begin_kernel();
  const int end = p.in.offsets[blockIdx.y + 1];
  const int channel = static_cast<int>(blockIdx.x) * kDotWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (channel >= p.down.rows) return;
  const glm_weight down = p.down.experts[blockIdx.y];
  for (int first = p.in.offsets[blockIdx.y] + static_cast<int>(blockIdx.z) * kDotTokens; first < end;
       first += static_cast<int>(gridDim.z) * kDotTokens) {
    const Act* x[kDotTokens];
    int32_t assignments[kDotTokens];
    const int count = find_dot_tokens(p.in, first, end, x, assignments);
    float sums[kDotTokens];
    warp_dots(static_cast<const W*>(down.data) + channel * down.stride, x, p.in.x.cols, sums);
    if (threadIdx.x % kWarp != 0) continue;
    for (int i = 0; i < count; ++i)
      product_row<Act>(p.y, p.ranks, p.in.top_k, assignments[i])[channel] = from_float<Act>(sums[i]);
  }
}

template <typename Act>
__global__ void combine_kernel(const __grid_constant__ CombineParams p) {
  begin_kernel();
  const int64_t row = blockIdx.x;
  const int32_t* ids = row_of<int32_t>(p.ids, row);
  const float* weights = row_of<float>(p.weights, row);
  for_each_pack(p.out.cols, [&](int32_t first) {
    if (first >= p.out.cols) return;
    float sums[kPack] = {};
    if (p.base.data != nullptr) load_pack(row_of<Act>(p.base, row), first, p.out.cols, sums);
    for (int32_t j = 0; j < p.top_k; ++j) {
      if (ids[j] < p.first || ids[j] >= p.first + p.count) continue;
      float values[kPack];
      load_pack(row_of<Act>(p.y, row * p.top_k + j), first, p.out.cols, values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sums[i] += weights[j] * values[i];
    }
    store_pack(row_of<Act>(p.out, row), first, p.out.cols, sums);
  });
}

constexpr int kFewThreads = 128;
constexpr int kFewRows = 128;

/* The same for at most kFewChoices experts a row and whole packs: all of a pack's products are read at once. Block (x, y): row, columns.
 * settled: ids and weights are there before the predecessor ends. */
__global__ void __launch_bounds__(kFewThreads)
    combine_few_kernel(const __grid_constant__ CombineParams p, bool settled) {
  release_successor();
  if (!settled) wait_for_predecessor();
  const int64_t row = blockIdx.x;
  int32_t ids[kFewChoices];
  float weights[kFewChoices];
#pragma unroll
  for (int j = 0; j < kFewChoices; ++j) {
    ids[j] = j < p.top_k ? __ldcg(row_of<int32_t>(p.ids, row) + j) - p.first : -1;
    weights[j] = j < p.top_k ? __ldcg(row_of<float>(p.weights, row) + j) : 0.0f;
  }
  wait_for_predecessor();
  const int32_t first = static_cast<int32_t>(blockIdx.y * kFewThreads + threadIdx.x) * kPack;
  if (first >= p.out.cols) return;
  float sums[kPack] = {};
  if (p.base.data != nullptr) load_pack(row_of<bf16>(p.base, row), first, p.out.cols, sums);
  PackOf<bf16> products[kFewChoices];
#pragma unroll
  for (int j = 0; j < kFewChoices; ++j) {
    if (ids[j] < 0 || ids[j] >= p.count) continue;
    products[j] = *reinterpret_cast<const PackOf<bf16>*>(row_of<bf16>(p.y, row * p.top_k + j) + first);
  }
#pragma unroll
  for (int j = 0; j < kFewChoices; ++j) {
    if (ids[j] < 0 || ids[j] >= p.count) continue;
#pragma unroll
    for (int i = 0; i < kPack; ++i) sums[i] += weights[j] * to_float(products[j].values[i]);
  }
  store_pack(row_of<bf16>(p.out, row), first, p.out.cols, sums);
}

}  // namespace

namespace {

/* Of moe_down and moe_down_each. */
template <typename Args>
ExpertInputs inputs_of(const Args& args) {
  return {args.x, args.x_scale, args.offsets, args.order, args.top_k, false};
}

/* Whether the products are those of wgmma, whose kernels release their successor only when the routing is known to be over. */
bool is_on_wgmma(const glm_device* device, const glm_moe_down_args& args) {
  bool on_tensor_cores = true;
  const auto scalar = [&] {
    on_tensor_cores = false;
    return GLM_OK;
  };
  with_operand(args.down.format, args.x.dtype, [](auto) { return GLM_OK; }, scalar);
  return on_tensor_cores && device->has_wgmma && args.out.dtype == GLM_BF16;
}

constexpr size_t kAddressBytes = 256; /* of products on each rank */
static_assert(kMaxPeers * sizeof(uint64_t) <= kAddressBytes);

size_t y_bytes(const glm_moe_down_args& args) {
  return static_cast<size_t>(args.rows) * args.top_k * args.down.rows * bytes_of(args.out.dtype);
}

template <typename Args>
size_t multiply_workspace(const Args& args) {
  if (!is_packed(inputs_of(args), args.down.format, args.out.dtype, args.rows)) return 0;
  return packed_bytes(static_cast<int64_t>(args.rows) * args.top_k, args.x.cols, args.down.count);
}

/* Each assignment's product, to its row of p.y. */
glm_status multiply(glm_device* device, const DownParams& p, int32_t rows, std::byte* workspace) {
  const auto experts = static_cast<unsigned>(p.down.count);
  return with_act(p.y.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    const auto on_tensor_cores = [&](auto operand) {
      if (device->has_wgmma && p.y.dtype == GLM_BF16) {
        ExpertParams on_wgmma{p.in, p.down, {}, p.y};
        on_wgmma.ranks = p.ranks;
        return experts_on_hopper<ExpertLayer::kDown, operand()>(device, on_wgmma, rows, workspace);
      }
      const Grid grid{dim3(blocks_for(p.down.rows, kExpertChannels), experts, token_blocks(rows, kExpertTokens)),
                      kExpertThreads, kExpertSharedBytes};
      return launch(device, "moe_down", grid, down_kernel<operand(), Act>, p);
    };
    const auto scalar = [&] {
      return with_weight(p.down.format, [&](auto weight) {
        using W = typename decltype(weight)::type;
        const Grid grid{dim3(blocks_for(p.down.rows, kDotWarps), experts, token_blocks(rows, kDotTokens)),
                        kDotWarps * kWarp};
        return launch(device, "moe_down", grid, down_scalar_kernel<Act, W>, p);
      });
    };
    return with_operand(p.down.format, p.in.x.dtype, on_tensor_cores, scalar);
  });
}

Touched touched_by_products(const glm_device* device, const glm_moe_down_args& args) {
  const int64_t assignments = int64_t{args.rows} * args.top_k;
  Touched touched;
  touched.reads(args.x, assignments).reads(args.x_scale, assignments);
  touched.reads(args.offsets, (args.down.count + size_t{1}) * sizeof(int32_t));
  touched.reads(args.order, assignments * sizeof(int32_t));
  return touched.writes(device->workspace, moe_down_workspace(&args));
}

/* Each assignment's product, to the workspace: whoever has computed `base` meanwhile is not waited for. */
glm_status multiply_apart(glm_device* device, const glm_moe_down_args& args, const glm_tensor& y) {
  const LineOfCall line(device, touched_by_products(device, args));
  return multiply(device, {inputs_of(args), args.down, y}, args.rows, device->workspace + y_bytes(args));
}

/* Products and what becomes of them, of a few tokens. */
glm_status multiply_combined(glm_device* device, const glm_moe_down_args& args, const CombineParams& combine) {
  const auto on_tensor_cores = [&](auto operand) {
    return combined_on_wgmma<operand()>(device, {inputs_of(args), args.down, {}, {}}, combine);
  };
  return with_operand(args.down.format, args.x.dtype, on_tensor_cores, [] { return GLM_INVALID_ARGUMENT; });
}

}  // namespace

size_t moe_down_workspace(const glm_moe_down_args* args) {
  return y_bytes(*args) + multiply_workspace(*args);
}

glm_status moe_down(glm_device* device, const glm_moe_down_args* args) {
  const glm_tensor y{device->workspace, args->out.dtype, args->down.rows, args->down.rows};
  const CombineParams combine{args->rows,    args->top_k, args->down.first, args->down.count, args->ids,
                              args->weights, y,           args->base,       args->out};
  if (args->rows <= kMostCombined && args->top_k <= kFewChoices && is_on_wgmma(device, *args)) {
    return multiply_combined(device, *args, combine);
  }
  if (const glm_status status = multiply_apart(device, *args, y); status != GLM_OK) return status;
  if (args->rows <= kFewRows && args->top_k <= kFewChoices && y.dtype == GLM_BF16 && y.cols % kPack == 0 &&
      reinterpret_cast<uintptr_t>(y.data) % alignof(PackOf<bf16>) == 0) {
    const Grid grid{dim3(static_cast<unsigned>(args->rows), blocks_for(y.cols, kFewThreads * kPack)), kFewThreads};
    return launch(device, "moe_down (combine)", grid, combine_few_kernel, combine, is_on_wgmma(device, *args));
  }
  if (args->rows > kFewRows && combines_many(combine)) return combine_many(device, combine);
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(args->out.cols)};
  return with_act(args->out.dtype, [&](auto act) {
    return launch(device, "moe_down (combine)", grid, combine_kernel<typename decltype(act)::type>, combine);
  });
}

size_t moe_down_each_workspace(const glm_moe_down_each_args* args) {
  return kAddressBytes + multiply_workspace(*args);
}

glm_status moe_down_each(glm_device* device, const glm_moe_down_each_args* args) {
  if (args->rows == 0) return GLM_OK;
  DownParams p{inputs_of(*args), args->down, args->out};
  if (sends_products(device)) {
    auto* const ranks = reinterpret_cast<uint64_t*>(device->workspace);
    if (const glm_status status = meet_products(device, args->out, ranks); status != GLM_OK) return status;
    p.ranks = {ranks, static_cast<uint32_t>(args->rows), static_cast<uint32_t>(device->peers.num_ranks)};
  }
  return multiply(device, p, args->rows, device->workspace + kAddressBytes);
}

}  // namespace glm::cuda
