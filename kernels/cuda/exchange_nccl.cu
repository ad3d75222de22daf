/* Rows of other ranks where GPUs do not reach each other's memory: NCCL sends them, gaps between rows included. */
#include "exchange.h"
#include "nccl.h"
#include "numeric.cuh"

namespace glm::cuda {

namespace {

constexpr size_t kAlignment = 256;

/* Of rows that lie at a stride, the last one without its gap. */
size_t bytes_of_rows(const Part& part, RowRange range) {
  const int64_t rows = (range.end - range.begin) * part.rows_each;
  return rows == 0 ? 0 : static_cast<size_t>((rows - 1) * part.x.stride + part.x.cols) * bytes_of(part.x.dtype);
}

size_t offset_of_row(const Part& part, int64_t row) {
  return static_cast<size_t>(row * part.rows_each * part.x.stride) * bytes_of(part.x.dtype);
}

/* Room for the rows of one rank, at most. */
size_t bytes_of_rank(const Part& part, int32_t rows, int num_ranks) {
  const size_t bytes = bytes_of_rows(part, {0, most_own_rows(rows, num_ranks)});
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

size_t bring_rows_workspace(const glm_device* device, const Part& part, int32_t rows) {
  if (device->nccl == nullptr || part.x.data == nullptr) return 0;
  return bytes_of_rank(part, rows, device->peers.num_ranks) * static_cast<size_t>(device->peers.num_ranks);
}

glm_status bring_rows(glm_device* device, const Part& part, int32_t rows, Brings brings, size_t* offset,
                      uint64_t tensors[kMaxPeers]) {
  const Peers& peers = device->peers;
  if (const glm_status status = check(device, cudaSetDevice(device->ordinal), "cudaSetDevice"); status != GLM_OK) {
    return status;
  }
  if (const glm_status status = join_branch(device); status != GLM_OK) return status;
  const auto* own = static_cast<const std::byte*>(part.x.data);
  int result = device->nccl->GroupStart();
  for (int peer = 0; peer < peers.num_ranks && result == 0; ++peer) {
    if (peer == peers.rank) continue;
    const RowRange mine = own_rows(rows, peers.rank, peers.num_ranks);
    const RowRange theirs = own_rows(rows, peer, peers.num_ranks);
    const RowRange sent = brings == Brings::kTheirs ? mine : theirs;
    const RowRange received = brings == Brings::kTheirs ? theirs : mine;
    std::byte* to = device->workspace + *offset;
    *offset += bytes_of_rank(part, rows, peers.num_ranks);
    tensors[peer] = reinterpret_cast<uint64_t>(to) - offset_of_row(part, received.begin);
    result = send_bytes(device, own + offset_of_row(part, sent.begin), bytes_of_rows(part, sent), peer);
    if (result == 0) result = receive_bytes(device, to, bytes_of_rows(part, received), peer);
  }
  const int ended = device->nccl->GroupEnd();
  return check_nccl(device, result != 0 ? result : ended, "ncclSend, ncclRecv");
}

}  // namespace glm::cuda
