#include <cooperative_groups.h>

#include <algorithm>

#include "beside.h"
#include "kernel.cuh"
#include "launch.h"
#include "mma.cuh"
#include "numeric.cuh"
#include "ops.h"

namespace glm::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kGroupParts = 4;               /* blocks that share an expert of many assignments */
constexpr int32_t kSplitFrom = 8 * kThreads; /* assignments */

/* Whose assignments count as load. */
struct Loads {
  uint64_t* counts; /* [count], or NULL */
  const int32_t* row_slots;
  int32_t spare_slot;
};

/* A block an expert, and one more for the end; a thread an assignment, all of them at once. */
__global__ void __launch_bounds__(kThreads)
    moe_group_once_kernel(glm_tensor ids, int32_t top_k, int32_t assignments, int32_t first, int32_t count,
                          int32_t* offsets, int32_t* order, Loads loads, bool beside) {
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
  begin_turn(beside);
  const int32_t id = valid ? __ldcg(row_of<int32_t>(ids, row) + a - row * top_k) - first : -1;
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
  const int load = __reduce_add_sync(0xffffffffu, is_warp ? counted[lane] : 0);
  if (a == 0) {
    offsets[expert] = at;
    if (load > 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(loads.counts) + expert, load); /* nobody waits for it */
  }
  end_turn(beside);
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
  bool beside;
};

constexpr int kQuad = 4;                        /* assignments that a lane reads at once */
constexpr int kChunk = kWarp * kQuad;           /* a warp */
constexpr int kMostChunks = kWarp / kQuad;      /* in a piece: a bit for each of a lane's assignments */
constexpr int kChunksInWord = sizeof(uint32_t); /* whose counts, of at most kChunk, have a byte each */

/* Global experts of the assignments [a, a + 4); what lies past the end is not this rank's. */
__device__ __forceinline__ int4 load_quad(const GroupParams& p, int32_t a) {
  const auto* dense = static_cast<const int32_t*>(p.ids.data);
  if (p.ids.stride == p.top_k && a + kQuad <= p.assignments && reinterpret_cast<uintptr_t>(dense) % sizeof(int4) == 0) {
    return __ldcg(reinterpret_cast<const int4*>(dense + a));
  }
  const auto id = [&](int32_t i) {
    return i < p.assignments ? __ldcg(row_of<int32_t>(p.ids, i / p.top_k) + i % p.top_k) : p.first - 1;
  };
  return make_int4(id(a), id(a + 1), id(a + 2), id(a + 3));
}

/* Which of a lane's assignments in the chunks from `begin` on are the expert's: bits 4c to 4c + 3 for chunk c. `before` counts
 * those of the rank's experts before it. */
__device__ __forceinline__ uint32_t find_own(const GroupParams& p, int32_t expert, int32_t begin, int chunks,
                                             int& before) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarp;
  int4 quads[kMostChunks];
#pragma unroll
  for (int c = 0; c < kMostChunks; ++c) {
    if (c < chunks) quads[c] = load_quad(p, begin + c * kChunk + lane * kQuad);
  }
  uint32_t own = 0;
#pragma unroll
  for (int c = 0; c < kMostChunks; ++c) {
    if (c >= chunks) break;
    const int32_t ids[kQuad] = {quads[c].x, quads[c].y, quads[c].z, quads[c].w};
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const int32_t id = ids[i] - p.first;
      before += static_cast<uint32_t>(id) < static_cast<uint32_t>(expert) ? 1 : 0;
      own |= id == expert ? 1u << (c * kQuad + i) : 0u;
    }
  }
  return own;
}

/* Lists a piece's assignments of the expert from order[at] on, and moves `at` on. Returns how many of the lane's count as load. */
__device__ __forceinline__ int list_own(const GroupParams& p, uint32_t own, int32_t begin, int chunks, int& at) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarp;
  uint32_t counts[kMostChunks / kChunksInWord] = {};
#pragma unroll
  for (int c = 0; c < kMostChunks; ++c) {
    counts[c / kChunksInWord] |= static_cast<uint32_t>(__popc(own >> c * kQuad & 0xfu)) << c % kChunksInWord * 8;
  }
  int load = 0;
#pragma unroll
  for (int word = 0; word < kMostChunks / kChunksInWord; ++word) {
    if (word * kChunksInWord >= chunks) break;
    uint32_t sums = counts[word];
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const uint32_t below = __shfl_up_sync(0xffffffffu, sums, offset);
      sums += lane >= offset ? below : 0;
    }
    const uint32_t totals = __shfl_sync(0xffffffffu, sums, kWarp - 1);
    const uint32_t earlier = sums - counts[word];
#pragma unroll
    for (int c = 0; c < kChunksInWord; ++c) {
      const int chunk = word * kChunksInWord + c;
      int to = at + static_cast<int>(earlier >> c * 8 & 0xffu);
      for (uint32_t bits = own >> chunk * kQuad & 0xfu; bits != 0; bits &= bits - 1) {
        const int32_t a = begin + chunk * kChunk + lane * kQuad + __ffs(static_cast<int>(bits)) - 1;
        p.order[to++] = a;
        if (p.loads.counts != nullptr) load += __ldcg(p.loads.row_slots + a / p.top_k) != p.loads.spare_slot ? 1 : 0;
      }
      at += static_cast<int>(totals >> c * 8 & 0xffu);
    }
  }
  return load;
}

/* Of a block's assignments, those of the rank's experts before its own, and those of its own. */
struct Counts {
  int before;
  int own;
};

/* From the counts of each block of a cluster the place of this one's first assignment; `total`: those before the expert. */
__device__ __forceinline__ int place_in_cluster(Counts& counts, const Counts& block, int& total) {
  const auto cluster = cooperative_groups::this_cluster();
  const auto lane = static_cast<unsigned>(threadIdx.x) % kWarp;
  if (threadIdx.x == 0) counts = block;
  cluster.sync();
  const Counts other = lane < cluster.num_blocks() ? *cluster.map_shared_rank(&counts, lane) : Counts{};
  total = __reduce_add_sync(0xffffffffu, other.before);
  const int place = total + __reduce_add_sync(0xffffffffu, lane < cluster.block_rank() ? other.own : 0);
  cluster_leave_together();
  return place;
}

/* A block an expert, and one more for the end; of many assignments, kParts blocks, a cluster. Each warp counts a span of assignments, its own
 * expert's and those of the experts before, and then lists its own. */
template <int kParts>
__global__ void __launch_bounds__(kThreads) moe_group_kernel(const __grid_constant__ GroupParams p) {
  __shared__ int earlier[kWarp];
  __shared__ int own[kWarp];
  __shared__ Counts counts;
  begin_turn(p.beside);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto expert = static_cast<int32_t>(blockIdx.x) / kParts;
  const int part = static_cast<int>(blockIdx.x) % kParts;
  const int chunks = (p.assignments + kParts * warps * kChunk - 1) / (kParts * warps * kChunk);
  const int32_t begin = (part * warps + warp) * chunks * kChunk;
  uint32_t mask = 0;
  int before = 0;
  int matches = 0;
  for (int c = 0; c < chunks; c += kMostChunks) {
    mask = find_own(p, expert, begin + c * kChunk, min(chunks - c, kMostChunks), before);
    matches += __popc(mask);
  }
  before = __reduce_add_sync(0xffffffffu, before);
  matches = __reduce_add_sync(0xffffffffu, matches);
  if (lane == 0) {
    earlier[warp] = before;
    own[warp] = matches;
  }
  __syncthreads();
  int total = __reduce_add_sync(0xffffffffu, lane < warps ? earlier[lane] : 0);
  const int found = lane < warps ? own[lane] : 0;
  int at = total;
  if (kParts > 1) at = place_in_cluster(counts, {total, __reduce_add_sync(0xffffffffu, found)}, total);
  if (threadIdx.x == 0 && part == 0) p.offsets[expert] = total;
  if (expert == p.count) return end_turn(p.beside);
  at += __reduce_add_sync(0xffffffffu, lane < warp ? found : 0);
  int load = 0;
  for (int c = 0; c < chunks; c += kMostChunks) {
    const int some = min(chunks - c, kMostChunks);
    if (chunks > kMostChunks) mask = find_own(p, expert, begin + c * kChunk, some, before);
    load += list_own(p, mask, begin + c * kChunk, some, at);
  }
  load = __reduce_add_sync(0xffffffffu, load);
  if (lane == 0 && load > 0) { /* nobody waits for it */
    atomicAdd(reinterpret_cast<unsigned long long*>(p.loads.counts) + expert, load);
  }
  end_turn(p.beside);
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
  const Grid grid{dim3(static_cast<unsigned>(args->count + 1)), std::min(kThreads, whole_warps), 0, 1, turn.beside()};
  const Loads loads{args->loads, args->loads == nullptr ? nullptr : args->step->row_slots, args->spare_slot};
  device->last_grouping = {args->ids,
                           args->offsets,
                           args->order,
                           args->rows,
                           args->first,
                           device->launches + 1,
                           turn.beside() ? device->last_turn.touched : Touched{}};
  if (assignments <= kThreads) {
    return launch(device, "moe_group", grid, moe_group_once_kernel, args->ids, args->top_k, assignments, args->first,
                  args->count, args->offsets, args->order, loads, turn.beside());
  }
  const GroupParams p{args->ids,     args->top_k, assignments, args->first,  args->count,
                      args->offsets, args->order, loads,       turn.beside()};
  if (assignments > kSplitFrom) {
    const Grid many{dim3(grid.blocks.x * kGroupParts), kThreads, 0, kGroupParts, turn.beside()};
    return launch(device, "moe_group", many, moe_group_kernel<kGroupParts>, p);
  }
  const int quads = (assignments + kQuad - 1) / kQuad;
  const Grid some{grid.blocks, std::min(kThreads, (quads + kWarp - 1) / kWarp * kWarp), 0, 1, turn.beside()};
  return launch(device, "moe_group", some, moe_group_kernel<1>, p);
}

}  // namespace glm::cuda
