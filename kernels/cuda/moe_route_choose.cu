/* The choice of experts for many tokens: a warp a row, its experts' keys in registers. */
#include "kernel.cuh"
#include "launch.h"
#include "moe_route_key.cuh"
#include "moe_route_wide.h"
#include "numeric.cuh"

namespace glm::cuda {

namespace {

constexpr int kRowsPerBlock = 8;
constexpr int kLaneExperts = 8; /* at most */
constexpr unsigned kAll = 0xffffffffu;

/* Of the lane's experts: every 32nd, from the lane on. */
struct LaneExperts {
  float scores[kLaneExperts];
  uint32_t keys[kLaneExperts];
};

__device__ __forceinline__ LaneExperts score_experts(const RouteChoice& p, int64_t row, int lane) {
  LaneExperts own;
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    const int expert = i * kWarp + lane;
    own.scores[i] = 0.0f;
    own.keys[i] = kTaken;
    if (expert >= p.experts) continue;
    own.scores[i] = 1.0f / (1.0f + expf(-p.logits[row * p.experts + expert]));
    const float choice = p.bias == nullptr ? own.scores[i] : own.scores[i] + p.bias[expert];
    own.keys[i] = ascending_key(isnan(choice) ? -INFINITY : choice); /* so that top_k experts are always found */
  }
  return own;
}

struct Choice {
  int expert;
  float score;
};

/* The expert of the largest key, ties to the lower, the same in every lane; it is taken. */
__device__ __forceinline__ Choice take_best(LaneExperts& own, int lane) {
  uint32_t best = kTaken;
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) best = max(best, own.keys[i]);
  best = __reduce_max_sync(kAll, best);
  unsigned candidate = kAll;
  float score = 0.0f;
#pragma unroll
  for (int i = kLaneExperts - 1; i >= 0; --i) {
    if (own.keys[i] != best) continue;
    candidate = static_cast<unsigned>(i * kWarp + lane);
    score = own.scores[i];
  }
  const int expert = static_cast<int>(__reduce_min_sync(kAll, candidate));
  score = __shfl_sync(kAll, score, expert % kWarp);
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) own.keys[i] = expert == i * kWarp + lane ? kTaken : own.keys[i];
  return {expert, score};
}

__global__ void __launch_bounds__(kRowsPerBlock* kWarp) route_choose_kernel(const __grid_constant__ RouteChoice p) {
  begin_turn(false);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  LaneExperts experts = score_experts(p, row, lane);
  Choice own = {0, 0.0f};
  float total = 0.0f;
  for (int i = 0; i < p.top_k; ++i) {
    const Choice choice = take_best(experts, lane);
    total += choice.score;
    if (i == lane) own = choice;
  }
  if (lane >= p.top_k) return;
  row_of<int32_t>(p.ids, row)[lane] = p.places == nullptr ? own.expert : p.places[own.expert];
  row_of<float>(p.weights, row)[lane] = (p.normalize != 0 ? own.score / (total + 1e-20f) : own.score) * p.scale;
}

}  // namespace

bool is_route_select_wide(const RouteChoice& p) {
  constexpr int kWideFrom = 256; /* rows */
  return p.rows >= kWideFrom && p.groups == 1 && p.experts <= kLaneExperts * kWarp;
}

glm_status route_select_wide(glm_device* device, const RouteChoice& p) {
  const Grid grid{dim3(blocks_for(p.rows, kRowsPerBlock)), kRowsPerBlock * kWarp};
  return launch(device, "moe_route (select)", grid, route_choose_kernel, p);
}

}  // namespace glm::cuda
