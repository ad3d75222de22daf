#include <atomic>

#include "collective.h"
#include "launch.h"
#include "memory.h"
#include "nccl.h"
#include "ops.h"
#include "peer_rows.cuh"

namespace glm::cuda {

namespace {

/* What a second hop costs, as bytes that a rank's links carry meanwhile. */
constexpr int64_t kHopBytes = 768 * 1024;
/* Without peer access: messages up to this size take one trip through host memory, larger ones NCCL. */
constexpr size_t kHostMessageBytes = 128 * 1024;

std::atomic<int32_t> forced_path{0};

template <typename Act>
__global__ void __launch_bounds__(kMaxRowThreads)
    all_reduce_kernel(const __grid_constant__ Peers peers, glm_tensor x, bool two_shots) {
  begin_kernel();
  PeerRows<Act> exchange(peers, x.cols, two_shots);
  const int64_t row = blockIdx.x;
  Act* data = row_of<Act>(x, row);
  float values[kPack];
  for_each_pack(x.cols, [&](int32_t first) {
    if (first >= x.cols) return;
    load_pack(data, first, x.cols, values);
    exchange.send(row, first, values);
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) count_exchange(peers);
  for_each_pack(x.cols, [&](int32_t first) {
    if (first >= x.cols) return;
    load_pack(data, first, x.cols, values);
    exchange.sum(row, first, values);
    store_pack(data, first, x.cols, values);
  });
  __syncthreads();
  exchange.close();
}

size_t message_bytes(glm_dtype act, int32_t rows, int32_t cols) {
  return static_cast<size_t>(rows) * blocks_for(cols, kPack) * kPack * bytes_of(act);
}

}  // namespace

ReducePath reduce_path(const glm_device* device, glm_dtype act, int32_t rows, int32_t cols) {
  const size_t bytes = message_bytes(act, rows, cols);
  if (device->nccl != nullptr) return bytes > kHostMessageBytes ? ReducePath::kNccl : ReducePath::kOneShot;
  if (bytes > kMessageBytes) return ReducePath::kInPlace;
  if (const auto forced = static_cast<ReducePath>(forced_path.load()); forced != ReducePath::kBySize) return forced;
  /* A rank sends ranks - 1 times the message in one shot, 2 * (ranks - 1) / ranks times in two. */
  const int64_t ranks = device->peers.num_ranks;
  const int64_t saved = static_cast<int64_t>(bytes) * (ranks - 1) * (ranks - 2) / ranks;
  return saved > kHopBytes ? ReducePath::kTwoShots : ReducePath::kOneShot;
}

size_t sum_workspace(const glm_device* device, const glm_tensor& x, int32_t rows) {
  return device->nccl == nullptr ? 0 : all_reduce_nccl_workspace(device, x, rows);
}

glm_status sum_large(glm_device* device, const glm_tensor& x, int32_t rows, ReducePath path) {
  return path == ReducePath::kNccl ? all_reduce_nccl(device, x, rows) : all_reduce_in_place(device, x, rows);
}

size_t all_reduce_workspace(const glm_device* device, const glm_all_reduce_args* args) {
  return sum_workspace(device, args->x, args->rows);
}

glm_status all_reduce(glm_device* device, const glm_all_reduce_args* args) {
  if (device->peers.num_ranks == 1 || args->rows == 0) return GLM_OK;
  if (const glm_status status = check_group(device); status != GLM_OK) return status;
  const glm_tensor& x = args->x;
  const ReducePath path = reduce_path(device, x.dtype, args->rows, x.cols);
  if (path == ReducePath::kInPlace || path == ReducePath::kNccl) return sum_large(device, x, args->rows, path);
  const Grid grid{dim3(static_cast<unsigned>(args->rows)), row_threads(x.cols)};
  return with_act(x.dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "all_reduce", grid, all_reduce_kernel<Act>, device->peers, x, path == ReducePath::kTwoShots);
  });
}

}  // namespace glm::cuda

extern "C" __attribute__((visibility("default"))) void glm_cuda_set_reduce_path(int32_t path) {
  glm::cuda::forced_path = path;
}
