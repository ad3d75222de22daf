#include <cstdio>
#include <cstring>
#include <memory>

#include "collective.h"
#include "group.h"
#include "memory.h"
#include "peers.h"

namespace glm::cuda {

namespace {

std::atomic<bool> pretends_no_peers{false};

/* Why a group cannot be made. */
struct Failure {
  glm_status status = GLM_OK;
  std::string text;
};

Failure failed(cudaError_t result, const char* what, int ordinal) {
  if (result == cudaSuccess) return {};
  const glm_status status = result == cudaErrorMemoryAllocation ? GLM_OUT_OF_MEMORY : GLM_DEVICE_ERROR;
  return {status, std::string(what) + " on GPU " + std::to_string(ordinal) + ": " + cudaGetErrorString(result) + " (" +
                      cudaGetErrorName(result) + ")"};
}

cudaError_t enable_peer(int from, int to) {
  if (cudaError_t result = cudaSetDevice(from); result != cudaSuccess) return result;
  const cudaError_t result = cudaDeviceEnablePeerAccess(to, 0);
  if (result != cudaErrorPeerAccessAlreadyEnabled) return result;
  cudaGetLastError(); /* or a later check would find it */
  return cudaSuccess;
}

/* Lets every GPU's kernels read and write the others' memory. `unreachable`: empty, or who cannot. */
Failure reach_all(const glm_group& group, std::string* unreachable) {
  for (const glm_device* from : group.devices) {
    for (const glm_device* to : group.devices) {
      if (from->ordinal == to->ordinal) continue;
      int can = 0;
      cudaError_t result = cudaDeviceCanAccessPeer(&can, from->ordinal, to->ordinal);
      if (result == cudaSuccess && (can == 0 || pretends_no_peers)) {
        *unreachable =
            "GPU " + std::to_string(from->ordinal) + " cannot reach the memory of GPU " + std::to_string(to->ordinal);
        return {};
      }
      if (result == cudaSuccess) result = enable_peer(from->ordinal, to->ordinal);
      if (result != cudaSuccess) return failed(result, "peer access", from->ordinal);
    }
  }
  return {};
}

Failure connect(glm_group& group, const std::string& unreachable) {
  std::string error;
  group.nccl = load_nccl(&error);
  if (group.nccl == nullptr) return {GLM_UNSUPPORTED, unreachable + ", and NCCL is not there: " + error};
  std::vector<int> ordinals;
  for (const glm_device* device : group.devices) ordinals.push_back(device->ordinal);
  std::vector<void*> communicators(ordinals.size());
  const int result = group.nccl->CommInitAll(communicators.data(), static_cast<int>(ordinals.size()), ordinals.data());
  if (result != 0) {
    return {GLM_DEVICE_ERROR, std::string("ncclCommInitAll: ") + group.nccl->GetErrorString(result)};
  }
  group.communicators = communicators;
  int version = 0;
  group.nccl->GetVersion(&version);
  for (glm_device* device : group.devices) {
    device->description +=
        "; " + unreachable + ": sums over ranks go through NCCL " + std::to_string(version) + " and host memory";
  }
  return {};
}

/* Words of exchange 0, and empty slots for rows. */
cudaError_t make_block(int ordinal, const ExchangeLayout& layout, bool on_host, void** out) {
  if (cudaError_t result = cudaSetDevice(ordinal); result != cudaSuccess) return result;
  const cudaError_t allocated =
      on_host ? cudaHostAlloc(out, layout.bytes(), cudaHostAllocPortable) : cudaMalloc(out, layout.bytes());
  if (allocated != cudaSuccess) return allocated;
  const size_t rows = layout.rows(0, 0);
  auto* data = static_cast<std::byte*>(*out);
  if (on_host) {
    std::memset(data, 0, rows);
    std::memset(data + rows, 0xff, layout.bytes() - rows);
    return cudaSuccess;
  }
  if (cudaError_t result = cudaMemset(data, 0, rows); result != cudaSuccess) return result;
  if (cudaError_t result = cudaMemset(data + rows, 0xff, layout.bytes() - rows); result != cudaSuccess) return result;
  return cudaDeviceSynchronize();
}

Failure allocate(glm_group& group) {
  const ExchangeLayout layout{static_cast<int>(group.devices.size())};
  for (size_t rank = 0; rank < group.devices.size(); ++rank) {
    const int ordinal = group.devices[rank]->ordinal;
    const cudaError_t result = make_block(ordinal, layout, group.nccl != nullptr, &group.blocks[rank]);
    if (result != cudaSuccess) return failed(result, "memory for exchanges", ordinal);
  }
  const cudaError_t result =
      cudaHostAlloc(reinterpret_cast<void**>(&group.board), sizeof(Board), cudaHostAllocPortable);
  if (result == cudaSuccess) *group.board = {};
  return failed(result, "cudaHostAlloc", group.devices.front()->ordinal);
}

void join(glm_group& group) {
  Peers peers;
  peers.num_ranks = static_cast<int32_t>(group.devices.size());
  peers.aborted = &group.board->aborted;
  for (size_t rank = 0; rank < group.blocks.size(); ++rank) {
    peers.blocks[rank] = static_cast<std::byte*>(group.blocks[rank]);
  }
  for (peers.rank = 0; peers.rank < peers.num_ranks; ++peers.rank) {
    peers.begun = &group.board->begun[peers.rank];
    glm_device* device = group.devices[static_cast<size_t>(peers.rank)];
    device->peers = peers;
    device->nccl = group.nccl;
    if (group.nccl != nullptr) device->communicator = group.communicators[static_cast<size_t>(peers.rank)];
  }
}

Failure make(glm_group& group) {
  if (group.devices.size() > kMaxPeers) {
    return {GLM_UNSUPPORTED, "expected at most " + std::to_string(kMaxPeers)};
  }
  std::string unreachable;
  Failure failure = reach_all(group, &unreachable);
  if (failure.status == GLM_OK && !unreachable.empty()) failure = connect(group, unreachable);
  if (failure.status == GLM_OK) failure = allocate(group);
  if (failure.status == GLM_OK) join(group);
  return failure;
}

}  // namespace

glm_status group_create(glm_device* const* devices, int32_t num_ranks, glm_group** out, char* error,
                        size_t error_size) {
  *out = nullptr;
  auto group = std::make_unique<glm_group>();
  group->devices.assign(devices, devices + num_ranks);
  group->blocks.resize(group->devices.size());
  const Failure failure = make(*group);
  if (failure.status != GLM_OK) {
    std::snprintf(error, error_size, "%s", failure.text.c_str());
    group_destroy(group.release());
    return failure.status;
  }
  *out = group.release();
  return GLM_OK;
}

void group_abort(glm_group* group) {
  __atomic_store_n(&group->board->aborted, 1u, __ATOMIC_SEQ_CST);
  if (group->abort_begun.test_and_set()) return;
  for (void* communicator : group->communicators) group->nccl->CommAbort(communicator);
}

void group_destroy(glm_group* group) {
  if (!group->abort_begun.test_and_set()) {
    for (void* communicator : group->communicators) group->nccl->CommAbort(communicator);
  }
  for (size_t rank = 0; rank < group->devices.size(); ++rank) {
    glm_device* device = group->devices[rank];
    device->peers = {};
    device->nccl = nullptr;
    cudaSetDevice(device->ordinal);
    group->nccl == nullptr ? cudaFree(group->blocks[rank]) : cudaFreeHost(group->blocks[rank]);
  }
  cudaFreeHost(group->board);
  delete group;
}

void group_progress(glm_group* group, uint64_t* begun) {
  for (size_t rank = 0; rank < group->devices.size(); ++rank) {
    begun[rank] = __atomic_load_n(&group->board->begun[rank], __ATOMIC_RELAXED);
  }
}

glm_status check_group(const glm_device* device) {
  const uint32_t* aborted = device->peers.aborted;
  if (aborted == nullptr || __atomic_load_n(aborted, __ATOMIC_SEQ_CST) == 0) return GLM_OK;
  device->last_error = "the group of ranks was aborted";
  return GLM_DEVICE_ERROR;
}

}  // namespace glm::cuda

extern "C" __attribute__((visibility("default"))) void glm_cuda_pretend_no_peers(int32_t pretends) {
  glm::cuda::pretends_no_peers = pretends != 0;
}
