/* moe_dispatch and moe_combine. */
#include "beside.h"
#include "exchange.cuh"
#include "ops.h"
#include "row.cuh"

namespace glm::cuda {

namespace {

constexpr int kMeetWarps = kMeetThreads / kWarp;

struct DispatchParams {
  int32_t rows;
  int32_t top_k;
  int32_t first;
  int32_t count;
  ByteRows ids;
  ByteRows x;
  ByteRows x_scale; /* of 0 bytes: there are none */
};

__device__ __forceinline__ void copy_row(const ByteRows& bytes, uint64_t from, uint64_t to, int64_t row) {
  for (int64_t unit = threadIdx.x % kWarp; unit < units_of(bytes.row_bytes); unit += kWarp) {
    copy_unit(bytes.of(from, row), bytes.of(to, row), unit, bytes.row_bytes);
  }
}

/* By a warp: a row of another rank, whose tensors are those. */
__device__ __forceinline__ void take_row(const DispatchParams& p, const Meeting<3>& meeting,
                                         const uint64_t (*tensors)[kMaxPeers], int peer, int64_t row) {
  const auto slot = static_cast<int32_t>(threadIdx.x) % kWarp;
  bool local = false;
  if (slot < p.top_k) {
    const int32_t id = reinterpret_cast<const int32_t*>(p.ids.of(tensors[0][peer], row))[slot];
    reinterpret_cast<int32_t*>(p.ids.of(meeting.own[0], row))[slot] = id;
    local = id >= p.first && id < p.first + p.count;
  }
  if (!__any_sync(0xffffffffu, local)) return;
  copy_row(p.x, tensors[1][peer], meeting.own[1], row);
  copy_row(p.x_scale, tensors[2][peer], meeting.own[2], row);
}

/* What runs beside it writes none of these tensors. */
__global__ void __launch_bounds__(kMeetThreads)
    dispatch_kernel(const __grid_constant__ Meeting<3> meeting, const __grid_constant__ DispatchParams p) {
  begin_turn(false);
  meet(meeting, [&](const uint64_t (*tensors)[kMaxPeers]) {
    const RowRange own = own_rows(p.rows, meeting.peers.rank, meeting.peers.num_ranks);
    const int64_t others = p.rows - (own.end - own.begin);
    const int64_t warp = int64_t{blockIdx.x} * kMeetWarps + threadIdx.x / kWarp;
    for (int64_t i = warp; i < others; i += int64_t{gridDim.x} * kMeetWarps) {
      const int64_t row = i < own.begin ? i : i + own.end - own.begin;
      take_row(p, meeting, tensors, owner_of(row, p.rows, meeting.peers.num_ranks), row);
    }
  });
}

/* When it ends every rank's stream has come this far. */
__global__ void __launch_bounds__(kMaxPeers) arrive_kernel(const __grid_constant__ Peers peers) {
  wait_for_predecessor();
  arrive(peers);
  release_successor(); /* as in the next */
}

__global__ void __launch_bounds__(kMaxPeers)
    meet_products_kernel(const __grid_constant__ Peers peers, uint64_t own, uint64_t* tensors) {
  __shared__ uint64_t all[1][kMaxPeers];
  wait_for_predecessor();
  if (threadIdx.x == 0) count_exchange(peers);
  Lane lane(peers, 0);
  /* Whoever has the address may write there: what this rank read of it before has been read. */
  __threadfence_system();
  const uint64_t mine[1] = {own};
  lane.gather(mine, all);
  lane.close();
  const int rank = static_cast<int>(threadIdx.x);
  if (rank < peers.num_ranks) tensors[rank] = all[0][rank] != 0 ? all[0][rank] : own; /* of a lost rank: harmless */
  /* Not before: the blocks of the product would take the place of those that ranks on the same GPU wait for. */
  release_successor();
}

struct CombineParams {
  int32_t rows;
  int32_t top_k;
  int32_t count;
  glm_tensor ids;
  glm_tensor weights;
  glm_tensor products;
  glm_tensor base;
  glm_tensor out;
};

constexpr int kProducts = 4; /* that a thread has asked for at once */

/* Columns [first, first + 8) of a row; products(expert): the tensor that has its products. */
template <typename Act, typename Products>
__device__ __forceinline__ void combine(const CombineParams& p, Products&& products, int64_t row, int32_t first) {
  const int32_t* ids = row_of<int32_t>(p.ids, row);
  const float* weights = row_of<float>(p.weights, row);
  float sum[kPack] = {};
  if (p.base.data != nullptr) load_pack(row_of<Act>(p.base, row), first, p.out.cols, sum);
  for (int32_t begin = 0; begin < p.top_k; begin += kProducts) {
    float terms[kProducts][kPack];
#pragma unroll
    for (int32_t j = 0; j < kProducts; ++j) {
      if (begin + j >= p.top_k) continue;
      const auto* tensor = reinterpret_cast<const Act*>(products(ids[begin + j]));
      load_pack(tensor + (row * p.top_k + begin + j) * p.products.stride, first, p.out.cols, terms[j]);
    }
#pragma unroll
    for (int32_t j = 0; j < kProducts; ++j) {
      if (begin + j >= p.top_k) continue;
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum[i] += weights[begin + j] * terms[j][i];
    }
  }
  store_pack(row_of<Act>(p.out, row), first, p.out.cols, sum);
}

template <typename Act>
__global__ void __launch_bounds__(kMeetThreads)
    combine_kernel(const __grid_constant__ Meeting<1> meeting, const __grid_constant__ CombineParams p) {
  begin_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0 && meeting.peers.num_ranks > 1) count_exchange(meeting.peers);
  const RowRange own = own_rows(p.rows, meeting.peers.rank, meeting.peers.num_ranks);
  const int64_t packs = (p.out.cols + kPack - 1) / kPack;
  const auto products = [&](int32_t expert) { return meeting.tensors[0][expert / p.count]; };
  for_each_item((own.end - own.begin) * packs, [&](int64_t item) {
    combine<Act>(p, products, own.begin + item / packs, static_cast<int32_t>(item % packs) * kPack);
  });
}

constexpr int kOwnThreads = 128;

/* Of products that all are here. Block (x, y): own row, columns. */
template <typename Act>
__global__ void __launch_bounds__(kOwnThreads)
    combine_own_kernel(const __grid_constant__ CombineParams p, int64_t first_row) {
  begin_kernel();
  const int32_t first = static_cast<int32_t>(blockIdx.y * kOwnThreads + threadIdx.x) * kPack;
  if (first >= p.out.cols) return;
  const auto products = [&](int32_t) { return reinterpret_cast<uint64_t>(p.products.data); };
  combine<Act>(p, products, first_row + blockIdx.x, first);
}

/* Of products that moe_down_each has sent. */
glm_status combine_sent(glm_device* device, const CombineParams& p) {
  if (const glm_status status = check_group(device); status != GLM_OK) return status;
  const glm_status arrived = launch(device, "moe_combine (arrive)", {dim3(1), kMaxPeers}, arrive_kernel, device->peers);
  if (arrived != GLM_OK) return arrived;
  const RowRange own = own_rows(p.rows, device->peers.rank, device->peers.num_ranks);
  const auto rows = static_cast<unsigned>(own.end - own.begin);
  const Grid grid{dim3(rows, blocks_for(p.out.cols, kOwnThreads * kPack)), kOwnThreads};
  return with_act(p.out.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "moe_combine", grid, combine_own_kernel<Act>, p, own.begin);
  });
}

}  // namespace

size_t moe_dispatch_workspace(const glm_device* device, const glm_moe_dispatch_args* args) {
  size_t bytes = 0;
  for (const glm_tensor& x : {args->ids, args->x, args->x_scale})
    bytes += bring_rows_workspace(device, {x}, args->rows);
  return bytes;
}

glm_status moe_dispatch(glm_device* device, const glm_moe_dispatch_args* args) {
  if (device->peers.num_ranks == 1 || args->rows == 0) return GLM_OK;
  Meeting<3> meeting;
  const glm_status status =
      arrange(device, {{args->ids}, {args->x}, {args->x_scale}}, args->rows, Brings::kTheirs, &meeting);
  if (status != GLM_OK) return status;
  DispatchParams p{args->rows, args->top_k, args->first, args->count, byte_rows(args->ids), byte_rows(args->x), {}};
  if (args->x_scale.data != nullptr) p.x_scale = byte_rows(args->x_scale);
  Touched touched;
  touched.writes(args->ids, args->rows).writes(args->x, args->rows).writes(args->x_scale, args->rows);
  const Turn turn(device, touched);
  return launch(device, "moe_dispatch", meet_grid(int64_t{args->rows} * kWarp), dispatch_kernel, meeting, p);
}

glm_status meet_products(glm_device* device, const glm_tensor& products, uint64_t* tensors) {
  if (const glm_status status = check_group(device); status != GLM_OK) return status;
  return launch(device, "moe_down_each (meet)", {dim3(1), kMaxPeers}, meet_products_kernel, device->peers,
                reinterpret_cast<uint64_t>(products.data), tensors);
}

size_t moe_combine_workspace(const glm_device* device, const glm_moe_combine_args* args) {
  return bring_rows_workspace(device, {args->products, args->top_k}, args->rows);
}

glm_status moe_combine(glm_device* device, const glm_moe_combine_args* args) {
  if (args->rows == 0) return GLM_OK;
  const CombineParams p{args->rows,    args->top_k,    args->count, args->ids,
                        args->weights, args->products, args->base,  args->out};
  if (sends_products(device)) return combine_sent(device, p);
  Meeting<1> meeting;
  const glm_status status = arrange(device, {{args->products, args->top_k}}, args->rows, Brings::kOwn, &meeting);
  if (status != GLM_OK) return status;
  const int64_t packs = blocks_for(args->out.cols, kPack);
  const Grid grid = meet_grid(most_own_rows(args->rows, device->peers.num_ranks) * packs);
  return with_act(args->out.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "moe_combine", grid, combine_kernel<Act>, meeting, p);
  });
}

}  // namespace glm::cuda
