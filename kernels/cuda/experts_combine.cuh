/* Down of a few tokens on wgmma, which adds up their products too: a cluster's blocks have all experts of 64 channels between them.
 * Each sends its experts' products, rounded as they would be stored, to the first block, which adds a token's in the order of its
 * experts: the same additions as in the kernel that combines stored products, so the same bits. */
#ifndef GLM_CUDA_EXPERTS_COMBINE_CUH
#define GLM_CUDA_EXPERTS_COMBINE_CUH

#include "cluster_sum.cuh"
#include "experts_walk.cuh"
#include "launch.h"

namespace glm::cuda {

constexpr int kCombineBlocks = 2; /* of a cluster */
constexpr int kProductBytes = (kWgmmaChannels + kPack) * 2;
constexpr int kTokenPacks = kWgmmaChannels / kPack;

/* In the cluster's first block: products[assignment] of its 64 channels, and a barrier that counts their bytes. */
struct Products {
  uint8_t* data;
  uint64_t* arrived;
};

/* A token's experts and their weights, and of 8 channels what their products are added to. */
struct CombinedPack {
  int token;
  int32_t channel;
  int32_t ids[kFewChoices];
  float weights[kFewChoices];
  float sums[kPack];
};

/* What was known before the grouping. */
__device__ __forceinline__ void find_choices(const CombineParams& c, int channel, CombinedPack& own) {
  own.token = static_cast<int>(threadIdx.x) / kTokenPacks;
  own.channel = channel + static_cast<int>(threadIdx.x) % kTokenPacks * kPack;
  if (own.token >= c.rows) return;
#pragma unroll
  for (int j = 0; j < kFewChoices; ++j) {
    own.ids[j] = j < c.top_k ? __ldcg(row_of<int32_t>(c.ids, own.token) + j) - c.first : -1;
    own.weights[j] = j < c.top_k ? __ldcg(row_of<float>(c.weights, own.token) + j) : 0.0f;
  }
}

__device__ __forceinline__ void load_base(const CombineParams& c, CombinedPack& own) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) own.sums[i] = 0.0f;
  if (own.token >= c.rows || c.base.data == nullptr || own.channel >= c.out.cols) return;
  load_pack(row_of<bf16>(c.base, own.token), own.channel, c.out.cols, own.sums);
}

/* The staged tile to the cluster's first block. */
__device__ __forceinline__ void send_products(const ExpertTile& tile, int half, const ExpertTables<kFewTokens>& tables,
                                              const Products& to) {
  const int i = static_cast<int>(threadIdx.x) / kTokenPacks;
  const int pack = static_cast<int>(threadIdx.x) % kTokenPacks;
  if (i >= tile.count) return;
  const uint32_t offset = tables.assignments[half][i] * kProductBytes + pack * 16;
  const float4 values = *reinterpret_cast<const float4*>(tables.y[i] + pack * kPack);
  const float words[4] = {values.x, values.y, values.z, values.w};
  send_16(cluster_address(to.data, 0) + offset, words, cluster_address(to.arrived, 0));
}

__device__ __forceinline__ void combine_products(const CombineParams& c, const Products& products, CombinedPack& own) {
  if (own.token >= c.rows || own.channel >= c.out.cols) return;
  const uint8_t* from = products.data + own.token * c.top_k * kProductBytes + threadIdx.x % kTokenPacks * 16;
#pragma unroll
  for (int j = 0; j < kFewChoices; ++j) {
    if (own.ids[j] < 0 || own.ids[j] >= c.count) continue;
    const auto product = *reinterpret_cast<const PackOf<bf16>*>(from + j * kProductBytes);
#pragma unroll
    for (int i = 0; i < kPack; ++i) own.sums[i] += own.weights[j] * to_float(product.values[i]);
  }
  store_pack(row_of<bf16>(c.out, own.token), own.channel, c.out.cols, own.sums);
}

/* By the multiplying warps. */
template <Operand kOperand>
__device__ __forceinline__ void multiply_and_combine(const ExpertParams& p, const CombineParams& c,
                                                     const ExpertInputs& in, const Listing& listing, int channel,
                                                     const FewPipe& pipe, ExpertTables<kFewTokens>& tables,
                                                     const Products& products) {
  const int rank = static_cast<int>(cluster_rank());
  if (rank == 0 && threadIdx.x == 0) {
    barrier_expect(products.arrived, listing.offsets[p.first.count] * kWgmmaChannels * sizeof(bf16));
  }
  CombinedPack own;
  find_choices(c, channel, own);
  wait_for_predecessor();
  load_base(c, own);
  cluster_wait();
  FewPipe::Place at;
  int half = 0;
  for (int n = rank;; n += kCombineBlocks, half ^= 1) {
    const int expert = find_touched(p, listing.offsets, n);
    if (expert < 0) break;
    const ExpertTile tile = whole_expert(listing.offsets, expert, channel);
    fill_tables<kOperand>(in, tile, half, tables);
    multiply_expert<ExpertLayer::kDown, kOperand, kFewTokens>(p, tile, half, pipe, tables, at);
    named_barrier(kMultiplyBarrier, kWarpgroup);
    send_products(tile, half, tables, products);
    __syncwarp();
  }
  if (rank > 0) return;
  barrier_wait_cluster(products.arrived, 0); /* so the block does not end before what is sent to it has come */
  combine_products(c, products, own);
}

/* By the warps that copy: those of weights run ahead of the predecessor, and of the cluster's start. */
template <Operand kOperand>
__device__ __forceinline__ void load_experts(const ExpertParams& p, const ExpertInputs& in, const Listing& listing,
                                             int channel, Role role, const FewPipe& pipe) {
  if (role == Role::kLoadTokens) wait_for_predecessor();
  FewPipe::Place at;
  for (int n = static_cast<int>(cluster_rank());; n += kCombineBlocks) {
    const int expert = find_touched(p, listing.offsets, n);
    if (expert < 0) break;
    if (role == Role::kLoadTokens) {
      const ExpertTile tile = whole_expert(listing.offsets, expert, channel);
      pipe.load_tokens(assignment_rows<kOperand, kFewTokens>(in, tile), p.steps(), p.k_bytes, p.tokens_aligned, at);
    } else {
      const ExpertPair weights = expert_weights<ExpertLayer::kDown>(p, expert);
      pipe.load_weights(expert_rows<ExpertLayer::kDown, kOperand>(weights, channel), p.steps(), p.k_bytes,
                        are_aligned<ExpertLayer::kDown, kOperand>(weights, p), at);
    }
  }
}

template <Operand kOperand>
__global__ void __launch_bounds__(kWgmmaThreads, 2)
    expert_combine_kernel(const __grid_constant__ ExpertParams p, const __grid_constant__ CombineParams c) {
  extern __shared__ uint4 shared[];
  __shared__ Ring<wgmma_stages(kFewTokens)> ring;
  __shared__ ExpertTables<kFewTokens> tables;
  __shared__ uint64_t arrived;
  start_cluster(&arrived);
  const FewPipe pipe{&ring, swizzle_aligned(reinterpret_cast<uint8_t*>(shared))};
  const Products products{pipe.stages + wgmma_stages(kFewTokens) * wgmma_stage_bytes(kFewTokens), &arrived};
  const Listing listing = begin_experts<ExpertLayer::kDown>(
      p, reinterpret_cast<int32_t*>(products.data + c.rows * c.top_k * kProductBytes), pipe);
  ExpertInputs in = p.in;
  in.order = listing.order;
  const int channel = static_cast<int>(blockIdx.x) / kCombineBlocks * kWgmmaChannels;
  const Role role = role_of_warp();
  if (role == Role::kMultiply) {
    multiply_and_combine<kOperand>(p, c, in, listing, channel, pipe, tables, products);
  } else {
    load_experts<kOperand>(p, in, listing, channel, role, pipe);
    cluster_wait();
  }
}

template <Operand kOperand>
glm_status launch_combined(glm_device* device, const ExpertParams& p, const CombineParams& c) {
  const size_t stages = static_cast<size_t>(wgmma_stages(kFewTokens)) * wgmma_stage_bytes(kFewTokens);
  const Grid grid{dim3(blocks_for(p.first.rows, kWgmmaChannels) * kCombineBlocks), kWgmmaThreads,
                  kSwizzleAlignment + stages + static_cast<size_t>(c.rows) * c.top_k * kProductBytes + listing_bytes(p),
                  kCombineBlocks};
  return launch(device, "moe_down", grid, expert_combine_kernel<kOperand>, p, c);
}

}  // namespace glm::cuda

#endif
