#include "attention_softmax.cuh"
#include "launch.h"
#include "ops.h"
#include "tensor_map.h"

namespace glm::cuda {

namespace {

/* With more rows than this there are blocks enough without splitting, and partial sums would take too much memory. */
constexpr int kMaxSplitRows = 256;
/* With more, clusters of blocks do not all find room at once. */
constexpr int kClusterRows = 32;
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

/* Block (x, y): unit, query head; a thread a column. */
__global__ void merge_splits_kernel(const __grid_constant__ AttentionParams p) {
  release_successor();
  if (!p.settled) wait_for_predecessor();
  const int row = row_of_unit(p, static_cast<int>(blockIdx.x));
  const int splits = row < 0 ? 0 : num_splits(__ldcg(p.step.positions + row) + 1);
  if (p.settled) wait_for_predecessor();
  if (splits <= p.merged_splits) return;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * p.heads + blockIdx.y) * p.max_splits;
  const int32_t dim = p.kv.head_dim;
  const int at = static_cast<int>(threadIdx.x);
  SoftmaxState state;
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < splits; ++i) {
    const float2 weights = p.partial_weights[first + i];
    const MergeFactors factors = merge(state, weights.x, weights.y);
    sum = merged(sum, p.partial_sums[(first + i) * dim + at], factors);
  }
  const float result = normalized(sum, state.sum);
  row_of<bf16>(p.out, row)[static_cast<int64_t>(blockIdx.y) * dim + at] = from_float<bf16>(result);
}

/* One block a split, then the merge of what no cluster has merged; or, with many rows, one block a row. */
glm_status decode(glm_device* device, AttentionParams& p, RowChoice choice, int units) {
  p.choice = choice;
  p.units = units;
  p.merged_splits = units <= kClusterRows ? kClusterSplits : 1;
  const bool split = units <= kMaxSplitRows;
  const glm_status status = attention_mma(device, p, split);
  if (status != GLM_OK || !split || p.max_splits <= p.merged_splits) return status;
  const Grid grid{dim3(static_cast<unsigned>(units), static_cast<unsigned>(p.heads)), p.kv.head_dim};
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
