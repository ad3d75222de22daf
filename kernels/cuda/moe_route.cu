#include <algorithm>

#include "beside.h"
#include "dot.cuh"
#include "launch.h"
#include "moe_route_key.cuh"
#include "moe_route_logits.cuh"
#include "moe_route_wide.h"
#include "ops.h"

namespace glm::cuda {

namespace {

template <typename Act, typename W>
__global__ void route_logits_kernel(glm_tensor x, glm_weight weight, int32_t rows, float* logits) {
  begin_kernel();
  const int expert = static_cast<int>(blockIdx.x) * kDotWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (expert >= weight.rows) return;
  const int first = static_cast<int>(blockIdx.y) * kDotTokens;
  const Act* tokens[kDotTokens];
  for (int i = 0; i < kDotTokens; ++i) tokens[i] = first + i < rows ? row_of<Act>(x, first + i) : nullptr;
  float sums[kDotTokens];
  warp_dots(static_cast<const W*>(weight.data) + expert * weight.stride, tokens, x.cols, sums);
  if (threadIdx.x % kWarp != 0) return;
  for (int i = 0; i < kDotTokens && first + i < rows; ++i) {
    logits[static_cast<int64_t>(first + i) * weight.rows + expert] = sums[i];
  }
}

constexpr int kSelectThreads = 1024;
constexpr int kSelectSplit = 4; /* threads that find an expert's rank */
constexpr int kFewSelections = 256;

__host__ __device__ constexpr int padded_experts(int experts) {
  return (experts + 3) / 4 * 4;
}

/* Index of the largest of n values that are not NaN, ties to the lower; for one warp. It is taken: it becomes NaN. */
__device__ int take_best(float* values, int n) {
  uint64_t best = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kWarp) {
    if (isnan(values[i])) continue;
    const uint64_t candidate = static_cast<uint64_t>(ascending_key(values[i])) << 32 | (0xffffffffu - i);
    best = candidate > best ? candidate : best;
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, best, offset);
    best = other > best ? other : best;
  }
  const int index = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
  if (threadIdx.x == 0) values[index] = nanf("");
  __syncwarp();
  return index;
}

/* Sum of the two best choices of each group. */
__device__ void score_groups(const float* choices, int groups, int size, float* scores) {
  for (int g = static_cast<int>(threadIdx.x); g < groups; g += kWarp) {
    float best = -INFINITY;
    float second = size > 1 ? -INFINITY : 0.0f;
    for (int i = 0; i < size; ++i) {
      const float choice = choices[g * size + i];
      if (choice > best) {
        second = size > 1 ? best : 0.0f;
        best = choice;
      } else if (choice > second) {
        second = choice;
      }
    }
    scores[g] = best + second;
  }
  __syncwarp();
}

/* Takes the experts of all groups but the topk_groups best. */
__device__ void drop_groups(const RouteChoice& p, float* choices, float* group_scores) {
  const int size = p.experts / p.groups;
  score_groups(choices, p.groups, size, group_scores);
  for (int i = 0; i < p.topk_groups; ++i) take_best(group_scores, p.groups);
  for (int e = static_cast<int>(threadIdx.x); e < p.experts; e += kWarp) {
    if (!isnan(group_scores[e / size])) choices[e] = nanf("");
  }
  __syncwarp();
}

/* How many keys stand before the expert's: larger ones, and equal ones of lower experts. By kSelectSplit neighbouring threads, of which
 * this is the `part`-th; the same in each. `keys`: [padded to whole uint4]. */
__device__ int rank_of_expert(const uint32_t* keys, int experts, int expert, int part) {
  const uint32_t key = keys[expert];
  const int own = expert / 4 * 4;
  int before = 0;
#pragma unroll 5
  for (int i = part * 4; i < experts; i += 4 * kSelectSplit) {
    const uint4 others = *reinterpret_cast<const uint4*>(keys + i);
    const uint32_t most = i == own ? 0xffffffffu : i < own ? key - 1 : key;
    before += (others.x > most ? 1 : 0) + (others.y > most ? 1 : 0);
    before += (others.z > most ? 1 : 0) + (others.w > most ? 1 : 0);
  }
  if (part == 0) {
    for (int i = own; i < own + 4; ++i) before += keys[i] > (i < expert ? key - 1 : key) ? 1 : 0;
  }
#pragma unroll
  for (int offset = 1; offset < kSelectSplit; offset *= 2) before += __shfl_xor_sync(0xffffffffu, before, offset);
  return before;
}

/* One block a row, for few rows kSelectSplit threads an expert. Shared: choices, which become keys; scores, group scores. */
__global__ void __launch_bounds__(kSelectThreads) route_select_kernel(const __grid_constant__ RouteChoice p) {
  extern __shared__ __align__(16) float choices[];
  __shared__ int32_t chosen[kWarp];
  const int padded = padded_experts(p.experts);
  float* scores = choices + padded;
  auto* keys = reinterpret_cast<uint32_t*>(choices);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const float own_bias = p.bias == nullptr || thread >= p.experts ? 0.0f : p.bias[thread];
  begin_turn(false);
  const int64_t row = blockIdx.x;
  for (int e = thread; e < p.experts; e += threads) {
    scores[e] = 1.0f / (1.0f + expf(-p.logits[row * p.experts + e]));
    const float choice = p.bias == nullptr ? scores[e] : scores[e] + (e == thread ? own_bias : p.bias[e]);
    choices[e] = isnan(choice) ? -INFINITY : choice; /* so that top_k distinct experts are always found */
  }
  if (p.groups > 1) {
    __syncthreads();
    if (thread < kWarp) drop_groups(p, choices, scores + p.experts);
    __syncthreads();
  }
  for (int e = thread; e < padded; e += threads) {
    keys[e] = e >= p.experts || isnan(choices[e]) ? kTaken : ascending_key(choices[e]);
  }
  __syncthreads();
  for (int base = 0; base < p.experts; base += threads / kSelectSplit) {
    const int e = base + thread / kSelectSplit;
    const int rank = rank_of_expert(keys, p.experts, min(e, p.experts - 1), thread % kSelectSplit);
    if (e < p.experts && keys[e] != kTaken && rank < p.top_k) chosen[rank] = e;
  }
  __syncthreads();
  if (thread >= kWarp) return;
  const int32_t expert = chosen[min(thread, p.top_k - 1)];
  const float score = scores[expert];
  float total = 0.0f;
  for (int j = 0; j < p.top_k; ++j) total += __shfl_sync(0xffffffffu, score, j);
  if (thread >= p.top_k) return;
  row_of<int32_t>(p.ids, row)[thread] = p.places == nullptr ? expert : p.places[expert];
  row_of<float>(p.weights, row)[thread] = (p.normalize != 0 ? score / (total + 1e-20f) : score) * p.scale;
}

glm_status compute_logits(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits) {
  return with_weight(args.format, [&](auto weight) {
    using W = typename decltype(weight)::type;
    if (are_route_logits_wide<W>(device, args)) return route_logits_wide<W>(device, args, beside, logits);
    if (args.x.dtype == GLM_BF16) return route_logits<W>(device, args, beside, logits);
    const Grid grid{dim3(blocks_for(args.experts, kDotWarps), blocks_for(args.rows, kDotTokens)), kDotWarps * kWarp};
    return launch(device, "moe_route (logits)", grid, route_logits_kernel<float, W>, args.x, args.weight, args.rows,
                  logits);
  });
}

}  // namespace

size_t moe_route_workspace(const glm_moe_route_args* args) {
  return static_cast<size_t>(args->rows) * args->experts * sizeof(float);
}

glm_status moe_route(glm_device* device, const glm_moe_route_args* args) {
  if (args->rows == 0) return GLM_OK;
  auto* logits = reinterpret_cast<float*>(device->workspace);
  Touched touched;
  touched.reads(args->x, args->rows).writes(args->ids, args->rows).writes(args->weights, args->rows);
  touched.writes(logits, moe_route_workspace(args));
  if (const glm_status status = mark_fork(device); status != GLM_OK) return status;
  const Turn turn(device, touched);
  const glm_status status = compute_logits(device, *args, turn.beside(), logits);
  if (status != GLM_OK) return status;
  const RouteChoice p{logits,      args->bias,   args->rows,        args->experts,
                      args->top_k, args->groups, args->topk_groups, args->normalize,
                      args->scale, args->ids,    args->weights,     args->places};
  if (is_route_select_wide(p)) return route_select_wide(device, p);
  /* Many rows share the multiprocessors: there as many threads as experts have least to do. */
  const int wanted = args->rows <= kFewSelections ? args->experts * kSelectSplit : args->experts;
  const int threads = std::min(kSelectThreads, (wanted + kWarp - 1) / kWarp * kWarp);
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), threads,
                  sizeof(float) * (padded_experts(args->experts) + args->experts + args->groups)};
  return launch(device, "moe_route (select)", grid, route_select_kernel, p);
}

}  // namespace glm::cuda
