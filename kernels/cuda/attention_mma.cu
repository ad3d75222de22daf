#include "attention_tile.cuh"
#include "launch.h"

namespace glm::cuda {

namespace {

constexpr int kWarps = kAttentionThreads / kWarp;
constexpr int kKeysPerWarp = kTileKeys / kWarps;
constexpr int kProbabilityPitch = kTileKeys + 8;

/* What is multiplied: FP8 keys and values, and then queries too, are taken as f16. */
template <typename Kv>
using Wide = std::conditional_t<std::is_same_v<Kv, fp8>, f16, bf16>;

__device__ __forceinline__ uint32_t pack(float x, float y, bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float x, float y, f16) {
  const __half2 pair = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

/* Shared memory of a block. Warps share a tile: each scores 16 of its keys, then each sums a quarter of the head's columns. */
template <typename Kv, int kDim>
struct AttentionShared {
  KvTile<Kv, kDim> stages[kKvStages];
  KvTile<f16, kDim> wide[std::is_same_v<Kv, fp8> ? 1 : 0];
  Wide<Kv> probabilities[kMmaHeads * kProbabilityPitch];
  float maxima[kWarps][kMmaHeads];
  float sums[kWarps][kMmaHeads];
};

/* A lane's part of a 16-row tile: rows group and group + 8, columns of this warp's quarter. */
template <int kDim>
struct Accumulator {
  static constexpr int kTiles = kDim / kWarps / 8;
  SoftmaxState states[2];
  float sums[kTiles][4] = {};
};

__device__ __forceinline__ int lane_group() {
  return static_cast<int>(threadIdx.x) % kWarp / 4;
}
__device__ __forceinline__ int lane_member() {
  return static_cast<int>(threadIdx.x) % 4;
}
__device__ __forceinline__ int warp_index() {
  return static_cast<int>(threadIdx.x) / kWarp;
}

/* Query heads [first, first + count) of a row as the A operand; absent heads are zero. */
template <typename T, int kDim>
__device__ __forceinline__ void load_queries(const bf16* q, int count, uint32_t out[kDim / 16][4]) {
  const bool aligned = reinterpret_cast<uintptr_t>(q) % 4 == 0;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = lane_group() + i % 2 * 8;
      const bf16* from = q + head * kDim + step * 16 + i / 2 * 8 + lane_member() * 2;
      if (head >= count) {
        out[step][i] = 0;
      } else if (aligned && std::is_same_v<T, bf16>) {
        out[step][i] = *reinterpret_cast<const uint32_t*>(from);
      } else {
        out[step][i] = pack(to_float(from[0]), to_float(from[1]), T{});
      }
    }
  }
}

/* Scores (log2) of this warp's 16 keys; -inf past the range. */
template <typename T, int kDim>
__device__ __forceinline__ void score_keys(const uint32_t queries[kDim / 16][4], const T* k, float scale, int keys_left,
                                           float scores[2][4]) {
  constexpr int kPitch = KvTile<T, kDim>::kPitch;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* row = k + (warp_index() * kKeysPerWarp + lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t b[4];
    load_matrices(b, row + step * 16);
    mma_16x8x16<T>(scores[0], queries[step], b[0], b[1]);
    mma_16x8x16<T>(scores[1], queries[step], b[2], b[3]);
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = warp_index() * kKeysPerWarp + tile * 8 + lane_member() * 2 + i % 2;
      scores[tile][i] = key < keys_left ? scores[tile][i] * scale : -INFINITY;
    }
  }
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* One entry a warp, combined in order. */
__device__ __forceinline__ float sum_of_warps(const float values[kWarps][kMmaHeads], int row) {
  return (values[0][row] + values[1][row]) + (values[2][row] + values[3][row]);
}

__device__ __forceinline__ float max_of_warps(const float values[kWarps][kMmaHeads], int row) {
  return fmaxf(fmaxf(values[0][row], values[1][row]), fmaxf(values[2][row], values[3][row]));
}

/* Turns scores into probabilities in shared memory, and rescales what was summed before. */
template <typename Shared, int kDim>
__device__ __forceinline__ void update_softmax(Shared& shared, float scores[2][4], Accumulator<kDim>& acc) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float own =
        fmaxf(fmaxf(scores[0][2 * half], scores[0][2 * half + 1]), fmaxf(scores[1][2 * half], scores[1][2 * half + 1]));
    const float largest = quad_max(own);
    if (lane_member() == 0) shared.maxima[warp_index()][lane_group() + half * 8] = largest;
  }
  __syncthreads();
  float before[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_group() + half * 8;
    SoftmaxState& state = acc.states[half];
    const float largest = fmaxf(state.max, max_of_warps(shared.maxima, row));
    before[half] = exp2_approx(state.max - largest);
    state.max = largest;
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float p0 = exp2_approx(scores[tile][2 * half] - largest);
      const float p1 = exp2_approx(scores[tile][2 * half + 1] - largest);
      sum += p0 + p1;
      const int at = row * kProbabilityPitch + warp_index() * kKeysPerWarp + tile * 8 + lane_member() * 2;
      *reinterpret_cast<uint32_t*>(shared.probabilities + at) = pack(p0, p1, shared.probabilities[0]);
    }
    sum = quad_sum(sum);
    if (lane_member() == 0) shared.sums[warp_index()][row] = sum;
  }
#pragma unroll
  for (int tile = 0; tile < Accumulator<kDim>::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc.sums[tile][i] *= before[i / 2];
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    SoftmaxState& state = acc.states[half];
    state.sum = fmaf(state.sum, before[half], sum_of_warps(shared.sums, lane_group() + half * 8));
  }
}

/* Adds probabilities times values for this warp's columns. */
template <typename T, int kDim>
__device__ __forceinline__ void add_values(const T* probabilities, const T* v, Accumulator<kDim>& acc) {
  constexpr int kPitch = KvTile<T, kDim>::kPitch;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* p_row = probabilities + (lane / 8 % 2 * 8 + lane % 8) * kProbabilityPitch + lane / 16 * 8;
  const T* v_row = v + (lane / 8 % 2 * 8 + lane % 8) * kPitch + warp_index() * (kDim / kWarps) + lane / 16 * 8;
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    uint32_t a[4];
    load_matrices(a, p_row + step * 16);
#pragma unroll
    for (int tile = 0; tile < Accumulator<kDim>::kTiles; tile += 2) {
      uint32_t b[4];
      load_matrices_transposed(b, v_row + step * 16 * kPitch + tile * 8);
      mma_16x8x16<T>(acc.sums[tile], a, b[0], b[1]);
      mma_16x8x16<T>(acc.sums[tile + 1], a, b[2], b[3]);
    }
  }
}

/* Starts the copies of a range's first tiles. */
template <typename Kv, int kDim>
__device__ __forceinline__ void begin_range(const KvSource& source, const KeyRange& keys,
                                            AttentionShared<Kv, kDim>& shared) {
#pragma unroll
  for (int i = 0; i < kKvStages - 1; ++i) {
    const int first = keys.first + i * kTileKeys;
    if (first < keys.last) copy_tile(shared.stages[i], source, page_ids(source, keys, first), keys, first);
    commit_copies();
  }
}

/* Online softmax over a range of keys, after begin_range. */
template <typename Kv, int kDim>
__device__ void attend_range(const AttentionParams& p, const KvSource& source, const uint32_t queries[kDim / 16][4],
                             const KeyRange& keys, AttentionShared<Kv, kDim>& shared, Accumulator<kDim>& acc) {
  const int tiles = (keys.last - keys.first + kTileKeys - 1) / kTileKeys;
  PageIds ahead = page_ids(source, keys, keys.first + (kKvStages - 1) * kTileKeys);
  for (int i = 0; i < tiles; ++i) {
    const int first = keys.first + i * kTileKeys;
    wait_copies<kKvStages - 2>();
    __syncthreads();
    if (i + kKvStages - 1 < tiles) {
      const int next = first + (kKvStages - 1) * kTileKeys;
      copy_tile(shared.stages[(i + kKvStages - 1) % kKvStages], source, ahead, keys, next);
      ahead = page_ids(source, keys, next + kTileKeys);
    }
    commit_copies();
    const Wide<Kv>* k;
    const Wide<Kv>* v;
    if constexpr (std::is_same_v<Kv, fp8>) {
      widen_tile<kDim>(shared.stages[i % kKvStages], shared.wide[0]);
      __syncthreads();
      k = shared.wide[0].k;
      v = shared.wide[0].v;
    } else {
      k = shared.stages[i % kKvStages].k;
      v = shared.stages[i % kKvStages].v;
    }
    float scores[2][4] = {};
    score_keys<Wide<Kv>, kDim>(queries, k, p.softmax_scale, keys.last - first, scores);
    update_softmax(shared, scores, acc);
    add_values<Wide<Kv>, kDim>(shared.probabilities, v, acc);
  }
}

/* Calls f(row of the tile, column of the head, sum, half) for every sum this lane holds. */
template <int kDim, typename F>
__device__ __forceinline__ void for_each_sum(const Accumulator<kDim>& acc, int heads, F&& f) {
#pragma unroll
  for (int tile = 0; tile < Accumulator<kDim>::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane_group() + i / 2 * 8;
      const int column = warp_index() * (kDim / kWarps) + tile * 8 + lane_member() * 2 + i % 2;
      if (row < heads) f(row, column, acc.sums[tile][i], i / 2);
    }
  }
}

template <int kDim>
__device__ void store_partial(const AttentionParams& p, int64_t row, int first_head, int heads, int split,
                              const Accumulator<kDim>& acc) {
  const int64_t base = (row * p.heads + first_head) * p.max_splits + split;
  for_each_sum<kDim>(acc, heads, [&](int head, int column, float sum, int half) {
    const int64_t at = base + static_cast<int64_t>(head) * p.max_splits;
    p.partial_sums[at * kDim + column] = sum;
    if (column == 0) p.partial_weights[at] = make_float2(acc.states[half].max, acc.states[half].sum);
  });
}

template <int kDim>
__device__ void merge_split(const Accumulator<kDim>& split, Accumulator<kDim>& total) {
  MergeFactors factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factors[half] = merge(total.states[half], split.states[half].max, split.states[half].sum);
  }
#pragma unroll
  for (int tile = 0; tile < Accumulator<kDim>::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total.sums[tile][i] = merged(total.sums[tile][i], split.sums[tile][i], factors[i / 2]);
  }
}

/* Block (x, y, z): split (if kSplit), row, KV head and tile of its query heads. */
template <typename Kv, int kDim, bool kSplit>
__global__ void __launch_bounds__(kAttentionThreads) attention_mma_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<AttentionShared<Kv, kDim>*>(raw);
  begin_kernel();
  const int64_t row = blockIdx.y;
  const int tiles_per_kv_head = (p.group + kMmaHeads - 1) / kMmaHeads;
  const int kv_head = static_cast<int>(blockIdx.z) / tiles_per_kv_head;
  const int first_in_group = static_cast<int>(blockIdx.z) % tiles_per_kv_head * kMmaHeads;
  const int first_head = kv_head * p.group + first_in_group;
  const int heads = min(kMmaHeads, p.group - first_in_group);
  const int keys = p.step.positions[row] + 1;
  const int size = split_keys(keys);
  if (kSplit && static_cast<int>(blockIdx.x) * size >= keys) return;
  const KvSource source = kv_source(p, row, kv_head);
  KeyRange range{kSplit ? static_cast<int>(blockIdx.x) * size : 0, 0};
  range.last = min(range.first + size, keys);
  begin_range<Kv, kDim>(source, range, shared);
  uint32_t queries[kDim / 16][4];
  load_queries<Wide<Kv>, kDim>(row_of<bf16>(p.q, row) + static_cast<int64_t>(first_head) * kDim, heads, queries);
  if constexpr (kSplit) {
    Accumulator<kDim> acc;
    attend_range<Kv, kDim>(p, source, queries, range, shared, acc);
    store_partial<kDim>(p, row, first_head, heads, static_cast<int>(blockIdx.x), acc);
  } else {
    Accumulator<kDim> total;
    for (;;) {
      Accumulator<kDim> acc;
      attend_range<Kv, kDim>(p, source, queries, range, shared, acc);
      merge_split<kDim>(acc, total);
      if (range.last == keys) break;
      range = {range.last, min(range.last + size, keys)};
      __syncthreads();
      begin_range<Kv, kDim>(source, range, shared);
    }
    bf16* out = row_of<bf16>(p.out, row) + static_cast<int64_t>(first_head) * kDim;
    for_each_sum<kDim>(total, heads, [&](int head, int column, float sum, int half) {
      out[head * kDim + column] = from_float<bf16>(sum / total.states[half].sum);
    });
  }
}

template <typename Kv, int kDim>
glm_status launch_attention(glm_device* device, const AttentionParams& p, int rows, bool split) {
  const auto tiles = static_cast<unsigned>(p.kv.kv_heads * ((p.group + kMmaHeads - 1) / kMmaHeads));
  const Grid grid{dim3(split ? static_cast<unsigned>(p.max_splits) : 1u, static_cast<unsigned>(rows), tiles),
                  kAttentionThreads, sizeof(AttentionShared<Kv, kDim>)};
  if (split) return launch(device, "paged_attention", grid, attention_mma_kernel<Kv, kDim, true>, p);
  return launch(device, "paged_attention", grid, attention_mma_kernel<Kv, kDim, false>, p);
}

}  // namespace

glm_status attention_mma(glm_device* device, const AttentionParams& params, int rows, bool split) {
  return with_kv(params.kv.dtype, [&](auto kv) {
    using Kv = std::conditional_t<std::is_same_v<typename decltype(kv)::type, fp8>, fp8, bf16>;
    if (params.kv.head_dim == 64) return launch_attention<Kv, 64>(device, params, rows, split);
    return launch_attention<Kv, 128>(device, params, rows, split);
  });
}

}  // namespace glm::cuda
