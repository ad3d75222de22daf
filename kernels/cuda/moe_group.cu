#include <algorithm>

#include "beside.h"
#include "kernel.cuh"
#include "launch.h"
#include "numeric.cuh"
#include "ops.h"

namespace glm::cuda {

namespace {

constexpr int kThreads = 1024;

/* How many of the block's `flag`s stand before this thread's, and how many there are. */
struct Rank {
  int before;
  int total;
};

__device__ Rank rank_in_block(bool flag, int* warp_counts) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned votes = __ballot_sync(0xffffffffu, flag);
  if (threadIdx.x % kWarp == 0) warp_counts[warp] = __popc(votes);
  __syncthreads();
  Rank rank{__popc(votes & ((1u << threadIdx.x % kWarp) - 1)), 0};
  for (int i = 0; i < kThreads / kWarp; ++i) {
    rank.before += i < warp ? warp_counts[i] : 0;
    rank.total += warp_counts[i];
  }
  __syncthreads();
  return rank;
}

/* Whose assignments count as load. */
struct Loads {
  uint64_t* counts; /* [count], or NULL */
  const int32_t* row_slots;
  int32_t spare_slot;
};

/* A block an expert, and one more for the end; a thread an assignment, all of them at once. */
__global__ void __launch_bounds__(kThreads)
    moe_group_once_kernel(glm_tensor ids, int32_t top_k, int32_t assignments, int32_t first, int32_t count,
                          int32_t* offsets, int32_t* order, Loads loads) {
  __shared__ int earlier[kWarp];
  __shared__ int own[kWarp];
  __shared__ int counted[kWarp];
  const int32_t expert = static_cast<int32_t>(blockIdx.x);
  const int32_t a = static_cast<int32_t>(threadIdx.x);
  const int warp = a / kWarp;
  const int lane = a % kWarp;
  const bool valid = a < assignments;
  const int32_t row = a / top_k;
  const bool counts = valid && loads.counts != nullptr && __ldcg(loads.row_slots + row) != loads.spare_slot;
  begin_turn(false);
  const int32_t id = valid ? row_of<int32_t>(ids, row)[a - row * top_k] - first : -1;
  const bool is_own = id == expert && expert < count;
  const unsigned own_votes = __ballot_sync(0xffffffffu, is_own);
  const unsigned earlier_votes = __ballot_sync(0xffffffffu, id >= 0 && id < expert);
  const unsigned counted_votes = __ballot_sync(0xffffffffu, is_own && counts);
  if (lane == 0) {
    earlier[warp] = __popc(earlier_votes);
    own[warp] = __popc(own_votes);
    counted[warp] = __popc(counted_votes);
  }
  __syncthreads();
  const bool is_warp = lane < static_cast<int>(blockDim.x) / kWarp;
  const int at = __reduce_add_sync(0xffffffffu, is_warp ? earlier[lane] : 0);
  const int before = __reduce_add_sync(0xffffffffu, lane < warp ? own[lane] : 0);
  if (is_own) order[at + before + __popc(own_votes & ((1u << lane) - 1))] = a;
  if (warp != 0) return;
  const int load = __reduce_add_sync(0xffffffffu, is_warp ? counted[lane] : 0);
  if (lane != 0) return;
  offsets[expert] = at;
  if (load > 0) atomicAdd(reinterpret_cast<unsigned long long*>(loads.counts) + expert, load); /* nobody waits for it */
}

/* One block an expert, and one more for the end: it counts the assignments of the experts before it, then lists its own. */
__global__ void __launch_bounds__(kThreads)
    moe_group_kernel(glm_tensor ids, int32_t top_k, int32_t assignments, int32_t first, int32_t count, int32_t* offsets,
                     int32_t* order, Loads loads) {
  __shared__ int counts[kThreads / kWarp];
  begin_turn(false);
  const int32_t expert = static_cast<int32_t>(blockIdx.x);
  const auto local_expert = [&](int32_t a) { return row_of<int32_t>(ids, a / top_k)[a % top_k] - first; };
  int earlier = 0;
  for (int32_t a = static_cast<int32_t>(threadIdx.x); a < assignments; a += kThreads) {
    const int32_t e = local_expert(a);
    earlier += e >= 0 && e < expert ? 1 : 0;
  }
  earlier = __reduce_add_sync(0xffffffffu, earlier);
  if (threadIdx.x % kWarp == 0) counts[threadIdx.x / kWarp] = earlier;
  __syncthreads();
  int at = 0;
  for (int i = 0; i < kThreads / kWarp; ++i) at += counts[i];
  __syncthreads();
  if (threadIdx.x == 0) offsets[expert] = at;
  if (expert == count) return;
  int load = 0;
  for (int32_t base = 0; base < assignments; base += kThreads) {
    const int32_t a = base + static_cast<int32_t>(threadIdx.x);
    const bool own = a < assignments && local_expert(a) == expert;
    const Rank rank = rank_in_block(own, counts);
    if (own) order[at + rank.before] = a;
    if (loads.counts != nullptr) load += __syncthreads_count(own && loads.row_slots[a / top_k] != loads.spare_slot);
    at += rank.total;
  }
  if (loads.counts != nullptr && threadIdx.x == 0) loads.counts[expert] += load;
}

}  // namespace

glm_status moe_group(glm_device* device, const glm_moe_group_args* args) {
  if (args->rows == 0) return GLM_OK;
  device->settled_offsets = nullptr;
  const int32_t assignments = args->rows * args->top_k;
  Touched touched;
  touched.reads(args->ids, args->rows).writes(args->order, assignments * sizeof(int32_t));
  touched.writes(args->offsets, (args->count + size_t{1}) * sizeof(int32_t));
  touched.writes(args->loads, args->loads == nullptr ? 0 : args->count * sizeof(uint64_t));
  const Turn turn(device, touched);
  const int whole_warps = (assignments + kWarp - 1) / kWarp * kWarp;
  const Grid grid{dim3(static_cast<unsigned>(args->count + 1)), std::min(kThreads, whole_warps)};
  const Loads loads{args->loads, args->loads == nullptr ? nullptr : args->step->row_slots, args->spare_slot};
  device->last_grouping = {args->ids, args->offsets, args->order, args->rows, args->first, device->launches + 1};
  return launch(device, "moe_group", grid, assignments <= kThreads ? moe_group_once_kernel : moe_group_kernel,
                args->ids, args->top_k, assignments, args->first, args->count, args->offsets, args->order, loads);
}

}  // namespace glm::cuda
