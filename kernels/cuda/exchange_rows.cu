/* reduce_scatter and all_gather. */
#include "exchange.cuh"
#include "ops.h"
#include "row.cuh"

namespace glm::cuda {

namespace {

template <typename Act>
__device__ __forceinline__ void add_up(const Peers& peers, const uint64_t* tensors, const glm_tensor& x, int64_t row,
                                       int32_t first) {
  const int64_t offset = row * x.stride;
  float sum[kPack];
  for (int peer = 0; peer < peers.num_ranks; ++peer) {
    float term[kPack];
    load_pack(reinterpret_cast<const Act*>(tensors[peer]) + offset, first, x.cols, term);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] = peer == 0 ? term[i] : sum[i] + term[i];
  }
  store_pack(row_of<Act>(x, row), first, x.cols, sum);
}

template <typename Act>
__global__ void __launch_bounds__(kMeetThreads)
    reduce_scatter_kernel(const __grid_constant__ Meeting<1> meeting, glm_tensor x, int32_t rows) {
  begin_kernel();
  meet(meeting, [&](const uint64_t (*tensors)[kMaxPeers]) {
    const RowRange own = own_rows(rows, meeting.peers.rank, meeting.peers.num_ranks);
    const int64_t packs = (x.cols + kPack - 1) / kPack;
    for_each_item((own.end - own.begin) * packs, [&](int64_t item) {
      const auto first = static_cast<int32_t>(item % packs) * kPack;
      add_up<Act>(meeting.peers, tensors[0], x, own.begin + item / packs, first);
    });
  });
}

__global__ void __launch_bounds__(kMeetThreads)
    all_gather_kernel(const __grid_constant__ Meeting<1> meeting, ByteRows bytes, int32_t rows) {
  begin_kernel();
  meet(meeting, [&](const uint64_t (*tensors)[kMaxPeers]) {
    const RowRange own = own_rows(rows, meeting.peers.rank, meeting.peers.num_ranks);
    const int64_t units = units_of(bytes.row_bytes);
    const int64_t others = rows - (own.end - own.begin);
    for_each_item(others * units, [&](int64_t item) {
      int64_t row = item / units;
      if (row >= own.begin) row += own.end - own.begin;
      const int peer = owner_of(row, rows, meeting.peers.num_ranks);
      copy_unit(bytes.of(tensors[0][peer], row), bytes.of(meeting.own[0], row), item % units, bytes.row_bytes);
    });
  });
}

}  // namespace

size_t reduce_scatter_workspace(const glm_device* device, const glm_reduce_scatter_args* args) {
  return bring_rows_workspace(device, {args->x}, args->rows);
}

glm_status reduce_scatter(glm_device* device, const glm_reduce_scatter_args* args) {
  if (device->peers.num_ranks == 1 || args->rows == 0) return GLM_OK;
  const glm_tensor& x = args->x;
  Meeting<1> meeting;
  if (const glm_status status = arrange(device, {{x}}, args->rows, Brings::kOwn, &meeting); status != GLM_OK) {
    return status;
  }
  const int64_t packs = blocks_for(x.cols, kPack);
  const Grid grid = meet_grid(most_own_rows(args->rows, device->peers.num_ranks) * packs);
  return with_act(x.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "reduce_scatter", grid, reduce_scatter_kernel<Act>, meeting, x, args->rows);
  });
}

size_t all_gather_workspace(const glm_device* device, const glm_all_gather_args* args) {
  return bring_rows_workspace(device, {args->x}, args->rows);
}

glm_status all_gather(glm_device* device, const glm_all_gather_args* args) {
  if (device->peers.num_ranks == 1 || args->rows == 0) return GLM_OK;
  const glm_tensor& x = args->x;
  Meeting<1> meeting;
  const glm_status status = arrange(device, {{x}}, args->rows, Brings::kTheirs, &meeting);
  if (status != GLM_OK) return status;
  const ByteRows bytes = byte_rows(x);
  return launch(device, "all_gather", meet_grid(int64_t{args->rows} * units_of(bytes.row_bytes)), all_gather_kernel,
                meeting, bytes, args->rows);
}

}  // namespace glm::cuda
