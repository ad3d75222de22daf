/* Adds the products of many rows' experts: a block has a row's whole packs of bf16. */
#ifndef GLM_CUDA_MOE_COMBINE_CUH
#define GLM_CUDA_MOE_COMBINE_CUH

#include <algorithm>

#include "experts_wgmma.h"
#include "launch.h"
#include "whole_row.cuh"

namespace glm::cuda {

/* A thread's packs of a row. */
template <int kEach>
using RowPacks = Packed[kEach];
template <int kEach>
using RowSums = float[kEach][kPack];

template <int kEach>
__device__ __forceinline__ void load_row(const glm_tensor& from, int64_t index, RowPacks<kEach>& packs) {
  for_each_whole<kEach>(from.cols,
                        [&](int j, int32_t first) { packs[j] = load_packed(row_of<bf16>(from, index) + first); });
}

template <int kEach>
__device__ __forceinline__ void store_row_sums(const RowSums<kEach>& sums, const glm_tensor& to, int64_t index) {
  for_each_whole<kEach>(to.cols, [&](int j, int32_t first) {
    Packed rounded;
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) rounded.words[i] = rounded_pair(sums[j][2 * i], sums[j][2 * i + 1]);
    store_packed(row_of<bf16>(to, index) + first, rounded);
  });
}

template <int kEach>
__device__ __forceinline__ void widen(const RowPacks<kEach>& packs, RowSums<kEach>& sums) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) {
      sums[j][2 * i] = low_of(packs[j].words[i]);
      sums[j][2 * i + 1] = high_of(packs[j].words[i]);
    }
  }
}

/* sums += weight * products. */
template <int kEach>
__device__ __forceinline__ void add_products(RowSums<kEach>& sums, float weight, const RowPacks<kEach>& products) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) {
      sums[j][2 * i] += weight * low_of(products[j].words[i]);
      sums[j][2 * i + 1] += weight * high_of(products[j].words[i]);
    }
  }
}

/* A block has every gridDim.x-th row, and asks for the next one's ids, and the next expert's products, before it needs them. in_place: out is base,
 * so that rows without an expert of this rank stay as they are. */
template <int kEach>
__global__ void combine_many_kernel(const __grid_constant__ CombineParams p, bool in_place) {
  begin_kernel();
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarp;
  const auto rows = static_cast<int32_t>(gridDim.x);
  const auto own_id = [&](int32_t row) { return lane < p.top_k ? row_of<int32_t>(p.ids, row)[lane] - p.first : -1; };
  int32_t following = own_id(static_cast<int32_t>(blockIdx.x));
  for (auto row = static_cast<int32_t>(blockIdx.x); row < p.rows; row += rows) {
    const bool is_local = following >= 0 && following < p.count;
    const float own_weight = is_local ? row_of<float>(p.weights, row)[lane] : 0.0f;
    uint32_t left = __ballot_sync(0xffffffffu, is_local);
    if (row + rows < p.rows) following = own_id(row + rows);
    if (left == 0 && in_place) continue;
    const int64_t first = static_cast<int64_t>(row) * p.top_k;
    RowPacks<kEach> base = {};
    RowPacks<kEach> products = {};
    int choice = __ffs(static_cast<int>(left)) - 1;
    if (p.base.data != nullptr) load_row<kEach>(p.base, row, base);
    if (left != 0) load_row<kEach>(p.y, first + choice, products);
    RowSums<kEach> sums;
    widen<kEach>(base, sums);
    while (left != 0) {
      const float weight = __shfl_sync(0xffffffffu, own_weight, choice);
      left &= left - 1;
      RowPacks<kEach> next = {};
      choice = __ffs(static_cast<int>(left)) - 1;
      if (left != 0) load_row<kEach>(p.y, first + choice, next);
      add_products<kEach>(sums, weight, products);
#pragma unroll
      for (int j = 0; j < kEach; ++j) products[j] = next[j];
    }
    store_row_sums<kEach>(sums, p.out, row);
  }
}

/* Whether the rows, as many as they are, can be combined so. */
inline bool combines_many(const CombineParams& p) {
  return p.top_k <= kWarp && p.out.dtype == GLM_BF16 && p.out.cols <= kMaxRowThreads * kPack &&
         has_whole_packs(p.y, p.y.cols) && has_whole_packs(p.base, p.out.cols) && has_whole_packs(p.out, p.out.cols);
}

inline glm_status combine_many(glm_device* device, const CombineParams& p) {
  constexpr int kBlocksPerMultiprocessor = 16;
  const bool in_place = p.base.data == p.out.data && p.base.stride == p.out.stride;
  const int threads = row_threads(p.out.cols);
  return with_each(p.rows, threads, [&](auto each) {
    const Grid grid{dim3(static_cast<unsigned>(std::min(p.rows, device->sm_count * kBlocksPerMultiprocessor))),
                    threads / each()};
    return launch(device, "moe_down (combine)", grid, combine_many_kernel<each()>, p, in_place);
  });
}

}  // namespace glm::cuda

#endif
