#include "experts_pack.h"
#include "tensor_map.h"
#include "tma.cuh"

namespace glm::cuda {

namespace {

constexpr int kThreads = 128;
constexpr size_t kAlignment = 256;

struct PackParams {
  ExpertParams layer;
  PackedExperts packed;
  CUtensorMap form; /* of any expert's weights, but for where they lie */
};

__device__ __forceinline__ bool is_usable(const glm_expert_weights& weights, int expert) {
  return weights.experts == nullptr || is_weight_aligned<Operand::kFp8Channel>(weights.experts[expert]);
}

/* By the first block. */
__device__ __forceinline__ void find_usable(const PackParams& p) {
  bool usable = true;
  for (int i = static_cast<int>(threadIdx.x); i < p.layer.first.count; i += kThreads) {
    usable = usable && is_usable(p.layer.first, i) && is_usable(p.layer.second, i);
  }
  const int all = __syncthreads_and(usable);
  if (threadIdx.x == 0) *p.packed.usable = all != 0 ? 1 : 0;
}

/* By a warp: one expert's maps. */
__device__ __forceinline__ void make_maps(const PackParams& p, int expert, CUtensorMap* shared_map) {
  for (int i = 0; i < 2; ++i) {
    const glm_expert_weights& weights = i == 0 ? p.layer.first : p.layer.second;
    if (weights.experts == nullptr || !is_usable(weights, expert)) continue;
    __syncwarp();
    if (threadIdx.x == 0) {
      *shared_map = p.form;
      redirect_map(shared_map, weights.experts[expert].data, weights.experts[expert].stride);
    }
    __syncwarp();
    publish_map(p.packed.maps + expert * 2 + i, shared_map);
  }
}

/* By a warp: a row, kCopies packs of each lane at a time. */
__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, int64_t columns) {
  constexpr int kCopies = 5;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t begin = lane * 16; begin < columns; begin += kCopies * kWarp * 16) {
    uint4 packs[kCopies];
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const int64_t at = begin + j * kWarp * 16;
      if (at < columns) packs[j] = __ldcg(reinterpret_cast<const uint4*>(from + at));
    }
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const int64_t at = begin + j * kWarp * 16;
      if (at < columns) *reinterpret_cast<uint4*>(to + at) = packs[j];
    }
  }
}

/* A warp copies every so many rows; the first `count` blocks make an expert's maps too. */
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams p) {
  __shared__ alignas(128) CUtensorMap shared_map;
  begin_kernel();
  const int block = static_cast<int>(blockIdx.x);
  if (block == 0) find_usable(p);
  if (block < p.layer.first.count && threadIdx.x < kWarp) make_maps(p, block, &shared_map);
  const ExpertInputs& in = p.layer.in;
  const int total = in.offsets[p.layer.first.count];
  const int64_t columns = in.x.cols;
  const int warps = static_cast<int>(gridDim.x) * (kThreads / kWarp);
  const int first = static_cast<int>(threadIdx.x) / kWarp * static_cast<int>(gridDim.x) + block;
  int32_t following = first < total ? in.order[first] : 0;
  for (int i = first; i < total; i += warps) {
    const int32_t assignment = following;
    if (i + warps < total) following = in.order[i + warps];
    if (threadIdx.x % kWarp == 0) {
      p.packed.outputs[i] = product_row<bf16>(p.layer.y, p.layer.ranks, in.top_k, assignment);
    }
    copy_row(p.packed.x + i * columns, static_cast<const uint8_t*>(in.x.data) + x_row(in, assignment) * in.x.stride,
             columns);
  }
}

size_t rounded(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

bool is_packed(const ExpertInputs& in, glm_weight_format format, glm_dtype act, int rows) {
  constexpr int kPackedFrom = 1024; /* tokens */
  return rows >= kPackedFrom && format == GLM_W_FP8_CHANNEL && act == GLM_BF16 &&
         are_tokens_aligned<Operand::kFp8Channel>(in);
}

size_t packed_bytes(int64_t assignments, int64_t columns, int count) {
  return 2 * kAlignment + rounded(static_cast<size_t>(assignments) * sizeof(bf16*)) +
         rounded(static_cast<size_t>(assignments * columns)) +
         rounded(2 * static_cast<size_t>(count) * sizeof(CUtensorMap));
}

PackedExperts packed_experts(std::byte* workspace, int64_t assignments, int64_t columns) {
  const auto start = reinterpret_cast<uintptr_t>(workspace);
  std::byte* at = workspace + (rounded(start) - start);
  PackedExperts packed;
  packed.usable = reinterpret_cast<int32_t*>(at);
  packed.outputs = reinterpret_cast<bf16**>(at + kAlignment);
  packed.x = reinterpret_cast<uint8_t*>(at + kAlignment + rounded(static_cast<size_t>(assignments) * sizeof(bf16*)));
  packed.maps = reinterpret_cast<CUtensorMap*>(packed.x + rounded(static_cast<size_t>(assignments * columns)));
  return packed;
}

glm_status pack_experts(glm_device* device, const ExpertParams& layer, int64_t assignments, const PackedExperts& packed,
                        int box) {
  PackParams p = {layer, packed, {}};
  const int64_t columns = layer.in.x.cols;
  const glm_status status = encode_map(device, "weights", &p.form, packed.x, layer.first.rows, columns, columns, box);
  if (status != GLM_OK) return status;
  constexpr int kBlocksPerMultiprocessor = 8;
  const int64_t most = std::min<int64_t>(assignments, device->sm_count * kBlocksPerMultiprocessor);
  const Grid grid{dim3(static_cast<unsigned>(std::max<int64_t>(most, layer.first.count))), kThreads};
  return launch(device, "moe (pack)", grid, pack_kernel, p);
}

}  // namespace glm::cuda
