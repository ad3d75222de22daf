#include "attention_softmax.cuh"
#include "launch.h"
#include "ops.h"
#include "tensor_map.h"

namespace glm::cuda {

namespace {

/* With more rows than this there are blocks enough without splitting, and partial sums would take too much memory. */
constexpr int kMaxSplitRows = 256;
/* Blocks of a multiprocessor, a block a split, up to which clusters of them all find room at once; and from which it does not matter that
 * they do not, since there are some turns of them: between, the merge is a kernel of its own. */
constexpr int kRoomyBlocks = 3;
constexpr int kManyBlocks = 8;
constexpr float kLog2E = 1.44269504088896340736f;

bool fits_tensor_cores(const glm_paged_attention_args& args) {
  const bool dtypes = args.q.dtype == GLM_BF16 && (args.kv.dtype == GLM_BF16 || args.kv.dtype == GLM_FP8_E4M3);
  return dtypes && (args.kv.head_dim == 64 || args.kv.head_dim == 128);
}

int max_splits(const glm_paged_attention_args& args) {
  return min(kMaxSplits, (args.slots->max_pages * GLM_PAGE_SIZE + kMinSplitKeys - 1) / kMinSplitKeys);
}

int64_t num_partials(const glm_paged_attention_args& args) {
  return static_cast<int64_t>(min(args.rows, kMaxSplitRows)) * args.heads * max_splits(args);
}

constexpr int kMergeThreads = 128;
constexpr int kMergeBlocks = 6; /* of a multiprocessor: with all the registers, the compiler starts the loads at once */

constexpr int kMergedAtOnce = 8; /* splits whose sums are on their way at once */

/* The result of four columns of the heads of a unit, whose splits are all in memory. */
__device__ __forceinline__ void merge_columns(const AttentionParams& p, int64_t unit, int row, int column, int splits) {
  const int32_t dim = p.kv.head_dim;
  const int64_t first = (unit * p.heads + column / dim) * p.max_splits;
  const float* from = p.partial_sums + first * dim + column % dim;
  SoftmaxState state;
  float4 sum = {};
  for (int done = 0; done < splits; done += kMergedAtOnce) {
    float2 weights[kMergedAtOnce];
    float4 added[kMergedAtOnce];
#pragma unroll
    for (int i = 0; i < kMergedAtOnce; ++i) {
      const int split = done + i;
      const bool exists = split < splits;
      weights[i] = exists ? __ldcg(p.partial_weights + first + split) : make_float2(-INFINITY, 0.0f);
      added[i] = exists ? __ldcg(reinterpret_cast<const float4*>(from + split * dim)) : float4{};
    }
#pragma unroll
    for (int i = 0; i < kMergedAtOnce; ++i) {
      const MergeFactors factors = merge(state, weights[i].x, weights[i].y);
      sum.x = merged(sum.x, added[i].x, factors);
      sum.y = merged(sum.y, added[i].y, factors);
      sum.z = merged(sum.z, added[i].z, factors);
      sum.w = merged(sum.w, added[i].w, factors);
    }
  }
  bf16* out = row_of<bf16>(p.out, row) + column;
  out[0] = from_float<bf16>(normalized(sum.x, state.sum));
  out[1] = from_float<bf16>(normalized(sum.y, state.sum));
  out[2] = from_float<bf16>(normalized(sum.z, state.sum));
  out[3] = from_float<bf16>(normalized(sum.w, state.sum));
}

/* Block (x, y): unit, so many times four columns of its heads; a thread four columns. */
__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks)
    merge_splits_kernel(const __grid_constant__ AttentionParams p) {
  release_successor();
  const bool waits_first = !p.settled && p.choice != RowChoice::kAll;
  if (waits_first) wait_for_predecessor();
  const int row = row_of_unit(p, static_cast<int>(blockIdx.x));
  const int splits = row < 0 ? 0 : num_splits(__ldcg(p.step.positions + row) + 1);
  if (!waits_first) wait_for_predecessor();
  const int32_t dim = p.kv.head_dim;
  const int column = static_cast<int>(blockIdx.y * kMergeThreads + threadIdx.x) * 4;
  if (splits <= p.merged_splits || column >= p.heads * dim) return;
  merge_columns(p, static_cast<int>(blockIdx.x), row, column, splits);
}

/* How many splits the blocks of a cluster merge. */
int merged_splits(const glm_device* device, const AttentionParams& p) {
  const int splits = min(p.max_splits, kClusterSplits);
  const int rows = p.units * p.kv.kv_heads * head_tiles(p);
  const int blocks = rows * kClusterSplits;
  const bool clusters = blocks <= kRoomyBlocks * device->sm_count || blocks > kManyBlocks * device->sm_count;
  return clusters ? splits : 1;
}

/* One block a split, then the merge of what no cluster has merged; or, with many rows, one block a row. */
glm_status decode(glm_device* device, AttentionParams& p, RowChoice choice, int units) {
  p.choice = choice;
  p.units = units;
  p.merged_splits = merged_splits(device, p);
  const bool split = units <= kMaxSplitRows;
  const glm_status status = attention_mma(device, p, split);
  if (status != GLM_OK || !split || p.max_splits <= p.merged_splits) return status;
  const Grid grid{dim3(static_cast<unsigned>(units), blocks_for(p.heads * p.kv.head_dim, 4 * kMergeThreads)),
                  kMergeThreads};
  return launch(device, "paged_attention (merge)", grid, merge_splits_kernel, p);
}

/* A box is 128 bytes of each token of a page. The cache's end is not known here: page ids are the scheduler's. */
glm_status make_map(glm_device* device, const char* what, const void* data, const glm_kv_layer& kv, CUtensorMap* map) {
  const int64_t token_bytes = kv.head_dim * static_cast<int64_t>(sizeof(bf16));
  return encode_map(device, what, map, data, INT32_MAX, token_bytes, token_bytes, GLM_PAGE_SIZE);
}

glm_status run_on_tensor_cores(glm_device* device, const glm_paged_attention_args& args, AttentionParams& p) {
  p.max_splits = max_splits(args);
  p.partial_sums = reinterpret_cast<float*>(device->workspace);
  p.partial_weights = reinterpret_cast<float2*>(p.partial_sums + num_partials(args) * args.kv.head_dim);
  const int seqs = p.step.num_seqs;
  p.settled = args.rows == seqs && device->settled_launches == device->launches;
  if (args.rows == seqs || !device->has_wgmma) {
    return decode(device, p, RowChoice::kAll, args.rows);
  }
  if (p.kv.dtype == GLM_BF16) {
    if (const glm_status made = make_map(device, "keys", p.kv.k, p.kv, &p.k_map); made != GLM_OK) return made;
    if (const glm_status made = make_map(device, "values", p.kv.v, p.kv, &p.v_map); made != GLM_OK) return made;
  }
  const glm_status status = attention_prefill(device, p);
  if (status != GLM_OK || seqs == 1) return status;
  return decode(device, p, RowChoice::kAlone, seqs);
}

}  // namespace

size_t paged_attention_workspace(const glm_device*, const glm_paged_attention_args* args) {
  if (!fits_tensor_cores(*args)) return 0;
  return static_cast<size_t>(num_partials(*args)) * (args->kv.head_dim * sizeof(float) + sizeof(float2));
}

glm_status paged_attention(glm_device* device, const glm_paged_attention_args* args) {
  if (args->rows == 0) return GLM_OK;
  AttentionParams p = {};
  p.step = *args->step;
  p.pages = {args->slots->page_table, args->slots->max_pages};
  p.q = args->q;
  p.kv = args->kv;
  p.out = args->out;
  p.heads = args->heads;
  p.group = args->heads / args->kv.kv_heads;
  p.softmax_scale = args->softmax_scale * kLog2E;
  return fits_tensor_cores(*args) ? run_on_tensor_cores(device, *args, p) : attention_scalar(device, p, args->rows);
}

}  // namespace glm::cuda
