#include "collective.h"
#include "launch.h"
#include "nccl.h"
#include "peers.cuh"
#include "row.cuh"

namespace glm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kBytesType = 1; /* ncclUint8 */

/* The workspace: [ranks][elements] of this rank, then the same part of every rank. */
struct Parts {
  int64_t elements; /* of a part */
  size_t element_bytes;
  std::byte* own;
  std::byte* received;

  Parts(const glm_device* device, const glm_tensor& x, int32_t rows)
      : elements((int64_t{rows} * x.cols + device->peers.num_ranks - 1) / device->peers.num_ranks),
        element_bytes(bytes_of(x.dtype)),
        own(device->workspace),
        received(device->workspace + device->peers.num_ranks * bytes()) {}

  size_t bytes() const { return static_cast<size_t>(elements) * element_bytes; }
};

template <typename Act>
__global__ void add_up_kernel(const __grid_constant__ Peers peers, Act* own, const Act* received, int64_t elements) {
  begin_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) count_exchange(peers);
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= elements) return;
  float sum = 0.0f;
  for (int32_t peer = 0; peer < peers.num_ranks; ++peer) {
    const float term = to_float(peer == peers.rank ? own[peer * elements + i] : received[peer * elements + i]);
    sum = peer == 0 ? term : sum + term;
  }
  own[peers.rank * elements + i] = from_float<Act>(sum);
}

glm_status copy_rows(glm_device* device, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                     int32_t rows) {
  const cudaError_t result =
      cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, cudaMemcpyDeviceToDevice, device->stream);
  return check(device, result, "cudaMemcpy2DAsync");
}

/* Each rank's part to that rank. */
int exchange_parts(const glm_device* device, const Parts& parts) {
  const Nccl& nccl = *device->nccl;
  int result = nccl.GroupStart();
  for (int32_t peer = 0; peer < device->peers.num_ranks && result == 0; ++peer) {
    if (peer == device->peers.rank) continue;
    const size_t offset = static_cast<size_t>(peer) * parts.bytes();
    result = send_bytes(device, parts.own + offset, parts.bytes(), peer);
    if (result == 0) result = receive_bytes(device, parts.received + offset, parts.bytes(), peer);
  }
  const int ended = nccl.GroupEnd();
  return result != 0 ? result : ended;
}

glm_status add_up(glm_device* device, const Parts& parts, glm_dtype dtype) {
  return with_act(dtype, [&](auto act) {
    using Act = typename decltype(act)::type;
    return launch(device, "all_reduce", Grid{dim3(blocks_for(parts.elements, kThreads)), kThreads}, add_up_kernel<Act>,
                  device->peers, reinterpret_cast<Act*>(parts.own), reinterpret_cast<const Act*>(parts.received),
                  parts.elements);
  });
}

}  // namespace

size_t all_reduce_nccl_workspace(const glm_device* device, const glm_tensor& x, int32_t rows) {
  return 2 * device->peers.num_ranks * Parts(device, x, rows).bytes();
}

glm_status all_reduce_nccl(glm_device* device, const glm_tensor& x, int32_t rows) {
  const Parts parts(device, x, rows);
  const size_t width = static_cast<size_t>(x.cols) * parts.element_bytes;
  const size_t pitch = static_cast<size_t>(x.stride) * parts.element_bytes;
  glm_status status = check(device, cudaSetDevice(device->ordinal), "cudaSetDevice");
  if (status == GLM_OK) status = join_branch(device);
  if (status == GLM_OK) status = copy_rows(device, parts.own, width, x.data, pitch, width, rows);
  if (status == GLM_OK) status = check_nccl(device, exchange_parts(device, parts), "ncclSend, ncclRecv");
  if (status == GLM_OK) status = add_up(device, parts, x.dtype);
  if (status != GLM_OK) return status;
  const std::byte* sums = parts.own + static_cast<size_t>(device->peers.rank) * parts.bytes();
  status = check_nccl(
      device, device->nccl->AllGather(sums, parts.own, parts.bytes(), kBytesType, device->communicator, device->stream),
      "ncclAllGather");
  return status == GLM_OK ? copy_rows(device, x.data, pitch, parts.own, width, width, rows) : status;
}

}  // namespace glm::cuda
