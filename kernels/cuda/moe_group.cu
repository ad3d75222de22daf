#include <algorithm>

#include "beside.h"
#include "kernel.cuh"
#include "launch.h"
#include "numeric.cuh"
#include "ops.h"

namespace glm::cuda {

namespace {

constexpr int kThreads = 1024;

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

struct GroupParams {
  glm_tensor ids;
  int32_t top_k;
  int32_t assignments;
  int32_t first;
  int32_t count;
  int32_t* offsets;
  int32_t* order;
  Loads loads;
};

/* Calls f(assignment, its local expert) for each of a warp's assignments [begin, end), 32 of them at a time, in every lane; past the end
 * the expert is negative. */
template <typename F>
__device__ __forceinline__ void for_each_assignment(const GroupParams& p, int32_t begin, int32_t end, F&& f) {
  constexpr int kAtOnce = 8; /* reads on their way */
  const bool is_dense = p.ids.stride == p.top_k;
  const auto* dense = static_cast<const int32_t*>(p.ids.data);
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarp;
  for (int32_t base = begin; base < end; base += kAtOnce * kWarp) {
    int32_t experts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t a = base + i * kWarp + lane;
      experts[i] = -1;
      if (a < end) experts[i] = (is_dense ? dense[a] : row_of<int32_t>(p.ids, a / p.top_k)[a % p.top_k]) - p.first;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) f(base + i * kWarp + lane, experts[i]);
  }
}

/* A block an expert, and one more for the end. Each warp counts a span of assignments, its own expert's and those of the experts before,
 * and then lists its own. */
__global__ void __launch_bounds__(kThreads) moe_group_kernel(const __grid_constant__ GroupParams p) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ int earlier[kWarps];
  __shared__ int own[kWarps];
  __shared__ int counted[kWarps];
  begin_turn(false);
  const int32_t expert = static_cast<int32_t>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int32_t span = (p.assignments + kThreads - 1) / kThreads * kWarp;
  const int32_t begin = min(warp * span, p.assignments);
  const int32_t end = min(begin + span, p.assignments);
  int before = 0;
  int matches = 0;
  for_each_assignment(p, begin, end, [&](int32_t, int32_t id) {
    before += id >= 0 && id < expert ? 1 : 0;
    matches += id == expert ? 1 : 0;
  });
  before = __reduce_add_sync(0xffffffffu, before);
  matches = __reduce_add_sync(0xffffffffu, matches);
  if (lane == 0) {
    earlier[warp] = before;
    own[warp] = matches;
  }
  __syncthreads();
  int at = __reduce_add_sync(0xffffffffu, earlier[lane]);
  if (threadIdx.x == 0) p.offsets[expert] = at;
  if (expert == p.count) return;
  at += __reduce_add_sync(0xffffffffu, lane < warp ? own[lane] : 0);
  int load = 0;
  for_each_assignment(p, begin, end, [&](int32_t a, int32_t id) {
    const bool is_own = id == expert;
    const unsigned votes = __ballot_sync(0xffffffffu, is_own);
    if (is_own) p.order[at + __popc(votes & ((1u << lane) - 1))] = a;
    at += __popc(votes);
    if (is_own && p.loads.counts != nullptr) load += p.loads.row_slots[a / p.top_k] != p.loads.spare_slot ? 1 : 0;
  });
  if (p.loads.counts == nullptr) return;
  load = __reduce_add_sync(0xffffffffu, load);
  if (lane == 0) counted[warp] = load;
  __syncthreads();
  if (warp != 0) return;
  load = __reduce_add_sync(0xffffffffu, counted[lane]);
  if (lane == 0) p.loads.counts[expert] += load;
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
  if (assignments <= kThreads) {
    return launch(device, "moe_group", grid, moe_group_once_kernel, args->ids, args->top_k, assignments, args->first,
                  args->count, args->offsets, args->order, loads);
  }
  const GroupParams p{args->ids, args->top_k, assignments, args->first, args->count, args->offsets, args->order, loads};
  return launch(device, "moe_group", grid, moe_group_kernel, p);
}

}  // namespace glm::cuda
