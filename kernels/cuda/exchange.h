/* The exchange of tokens (ops.h): who has which rows, and how a rank comes to the rows of others. */
#ifndef GLM_CUDA_EXCHANGE_H
#define GLM_CUDA_EXCHANGE_H

#include "collective.h"
#include "device.h"

namespace glm::cuda {

struct RowRange {
  int64_t begin;
  int64_t end;

  __host__ __device__ bool has(int64_t row) const { return begin <= row && row < end; }
};

/* The rows that a rank has to itself. */
__host__ __device__ inline RowRange own_rows(int64_t rows, int rank, int num_ranks) {
  return {rows * rank / num_ranks, rows * (rank + 1) / num_ranks};
}
/* The rank that has it. */
__host__ __device__ inline int owner_of(uint32_t row, uint32_t rows, uint32_t num_ranks) {
  return static_cast<int>(((row + 1) * num_ranks - 1) / rows);
}
/* Of the rank that has most: what grids are made for, which are the same on every rank. */
inline int64_t most_own_rows(int64_t rows, int num_ranks) {
  return (rows + num_ranks - 1) / num_ranks;
}

/* What a kernel reads of each rank: N tensors, at the same rows and strides on every rank. A kernel's parameter. */
template <int N>
struct Meeting {
  Peers peers;
  uint64_t own[N] = {}; /* addresses on this rank; own[0] is not 0 */
  /* The other ranks' rows have been brought to this GPU, as if their tensors began at `tensors`. */
  bool brought = false;
  uint64_t tensors[N][kMaxPeers] = {}; /* with `brought`: addresses by rank */
};

/* Which rows of other ranks an operation reads. */
enum class Brings {
  kTheirs, /* of each rank those that it has to itself */
  kOwn     /* of each rank those that this rank has to itself */
};

/* A tensor with `rows_each` rows for each of the step's. */
struct Part {
  glm_tensor x; /* data NULL: there is none */
  int32_t rows_each = 1;
};

/* Rows of a part from the other ranks into the workspace, from `offset` on, which is moved past them, by NCCL: tensors[rank] is where row 0
 * of that rank would be. */
glm_status bring_rows(glm_device* device, const Part& part, int32_t rows, Brings brings, size_t* offset,
                      uint64_t tensors[kMaxPeers]);
/* 0 where GPUs reach each other. */
size_t bring_rows_workspace(const glm_device* device, const Part& part, int32_t rows);

/* What a kernel that reads those rows is given. */
template <int N>
glm_status arrange(glm_device* device, const Part (&parts)[N], int32_t rows, Brings brings, Meeting<N>* meeting) {
  if (const glm_status status = check_group(device); status != GLM_OK) return status;
  meeting->peers = device->peers;
  meeting->brought = device->peers.num_ranks == 1 || device->nccl != nullptr;
  size_t offset = 0;
  for (int i = 0; i < N; ++i) {
    meeting->own[i] = reinterpret_cast<uint64_t>(parts[i].x.data);
    meeting->tensors[i][device->peers.rank] = meeting->own[i];
    if (device->nccl == nullptr || parts[i].x.data == nullptr) continue;
    const glm_status status = bring_rows(device, parts[i], rows, brings, &offset, meeting->tensors[i]);
    if (status != GLM_OK) return status;
  }
  return GLM_OK;
}

/* moe_down_each writes each product where moe_combine reads it, on the rank that has its token to itself. Else GPUs do not reach each
 * other's memory, or there is one rank. */
inline bool sends_products(const glm_device* device) {
  return device->peers.num_ranks > 1 && device->nccl == nullptr;
}

/* Waits for all ranks; then tensors[rank], on the device, is the address of the `products` that each gave. It counts as the exchange of the
 * moe_combine to come. */
glm_status meet_products(glm_device* device, const glm_tensor& products, uint64_t* tensors);

}  // namespace glm::cuda

#endif
