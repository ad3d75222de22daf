#include <cstdio>
#include <memory>

#include "collective.h"
#include "group.h"
#include "peers.h"

namespace glm::cuda {

namespace {

/* A failed call's name and text. */
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

/* Lets one GPU's kernels read and write the other's memory. */
Failure reach(int from, int to) {
  if (from == to) return {};
  int can = 0;
  if (Failure failure = failed(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer", from);
      failure.status != GLM_OK) {
    return failure;
  }
  if (can == 0) {
    return {GLM_UNSUPPORTED, "GPU " + std::to_string(from) + " cannot reach the memory of GPU " + std::to_string(to) +
                                 "; ranks need GPUs that are joined by NVLink or PCIe peer access"};
  }
  if (Failure failure = failed(cudaSetDevice(from), "cudaSetDevice", from); failure.status != GLM_OK) return failure;
  const cudaError_t result = cudaDeviceEnablePeerAccess(to, 0);
  if (result == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError(); /* or a later check would find it */
    return {};
  }
  return failed(result, "cudaDeviceEnablePeerAccess", from);
}

Failure reach_all(const glm_group& group) {
  for (const glm_device* from : group.devices) {
    for (const glm_device* to : group.devices) {
      if (Failure failure = reach(from->ordinal, to->ordinal); failure.status != GLM_OK) return failure;
    }
  }
  return {};
}

/* Words of exchange 0, and empty slots for rows. */
cudaError_t make_block(int ordinal, const ExchangeLayout& layout, void** out) {
  if (cudaError_t result = cudaSetDevice(ordinal); result != cudaSuccess) return result;
  if (cudaError_t result = cudaMalloc(out, layout.bytes()); result != cudaSuccess) return result;
  const size_t rows = layout.rows(0, 0);
  if (cudaError_t result = cudaMemset(*out, 0, rows); result != cudaSuccess) return result;
  auto* data = static_cast<std::byte*>(*out);
  if (cudaError_t result = cudaMemset(data + rows, 0xff, layout.bytes() - rows); result != cudaSuccess) return result;
  return cudaDeviceSynchronize();
}

Failure allocate(glm_group& group) {
  const ExchangeLayout layout{static_cast<int>(group.devices.size())};
  for (size_t rank = 0; rank < group.devices.size(); ++rank) {
    const int ordinal = group.devices[rank]->ordinal;
    if (Failure failure = failed(make_block(ordinal, layout, &group.blocks[rank]), "memory for exchanges", ordinal);
        failure.status != GLM_OK) {
      return failure;
    }
  }
  const cudaError_t result =
      cudaHostAlloc(reinterpret_cast<void**>(&group.aborted), sizeof(uint32_t), cudaHostAllocPortable);
  if (result == cudaSuccess) *group.aborted = 0;
  return failed(result, "cudaHostAlloc", group.devices.front()->ordinal);
}

void join(glm_group& group) {
  Peers peers;
  peers.num_ranks = static_cast<int32_t>(group.devices.size());
  peers.aborted = group.aborted;
  for (size_t rank = 0; rank < group.blocks.size(); ++rank) {
    peers.blocks[rank] = static_cast<std::byte*>(group.blocks[rank]);
  }
  for (peers.rank = 0; peers.rank < peers.num_ranks; ++peers.rank) {
    group.devices[static_cast<size_t>(peers.rank)]->peers = peers;
  }
}

}  // namespace

glm_status group_create(glm_device* const* devices, int32_t num_ranks, glm_group** out, char* error,
                        size_t error_size) {
  *out = nullptr;
  auto group = std::make_unique<glm_group>();
  group->devices.assign(devices, devices + num_ranks);
  group->blocks.resize(group->devices.size());
  Failure failure = reach_all(*group);
  if (failure.status == GLM_OK) failure = allocate(*group);
  if (failure.status != GLM_OK) {
    std::snprintf(error, error_size, "%s", failure.text.c_str());
    group_destroy(group.release());
    return failure.status;
  }
  join(*group);
  *out = group.release();
  return GLM_OK;
}

void group_abort(glm_group* group) {
  __atomic_store_n(group->aborted, 1u, __ATOMIC_SEQ_CST);
}

void group_destroy(glm_group* group) {
  for (size_t rank = 0; rank < group->devices.size(); ++rank) {
    group->devices[rank]->peers = {};
    cudaSetDevice(group->devices[rank]->ordinal);
    cudaFree(group->blocks[rank]);
  }
  cudaFreeHost(group->aborted);
  delete group;
}

glm_status check_group(const glm_device* device) {
  const uint32_t* aborted = device->peers.aborted;
  if (aborted == nullptr || __atomic_load_n(aborted, __ATOMIC_SEQ_CST) == 0) return GLM_OK;
  device->last_error = "the group of ranks was aborted";
  return GLM_DEVICE_ERROR;
}

}  // namespace glm::cuda
