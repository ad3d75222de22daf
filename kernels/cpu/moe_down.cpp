#include <algorithm>

#include "device.h"
#include "expert_tasks.h"
#include "kept_tile.h"
#include "ops.h"

GLM_CPU_BEGIN

namespace {

constexpr int32_t kCombineCols = 1024; /* columns that a thread combines at a time */

struct Scratch {
  Scratch(std::byte* base, const glm_device* device, const glm_moe_down_args* args)
      : layout(base),
        tasks(layout, args->down.count),
        kept(layout, device->pool.num_threads(), args->down.cols),
        pitch(padded(args->down.rows)) {
    const auto threads = static_cast<size_t>(device->pool.num_threads());
    const size_t assignments = static_cast<size_t>(args->rows) * args->top_k;
    x = layout.take<float>(activation_floats(args->rows * args->top_k, args->x.cols));
    products = layout.take<float>(threads * kMatmulOutFloats);
    if (args->weights.data == nullptr) return; /* nothing is combined */
    combine = layout.take<float>(threads * 2 * kCombineCols);
    results = layout.take<std::byte>(assignments * pitch * dtype_bytes(args->out.dtype));
  }
  glm_tensor result_rows(const glm_moe_down_args* args) const {
    return {results, args->out.dtype, args->down.rows, pitch};
  }
  WorkspaceLayout layout;
  ExpertTasks tasks;
  KeptWeights kept;
  int64_t pitch;
  float* x;
  float* products;              /* one block of results a thread */
  float* combine = nullptr;     /* [threads][2][kCombineCols] */
  std::byte* results = nullptr; /* act [rows * top_k][pitch]: each assignment's own product */
};

void* element(const glm_tensor& tensor, int64_t row, int64_t col) {
  return static_cast<std::byte*>(row_of(tensor, row)) + col * static_cast<int64_t>(dtype_bytes(tensor.dtype));
}

/* next: the task that this thread will probably run after this one. */
void run_task(const glm_moe_down_args* args, const ExpertTask& task, const ExpertTask& next, const Activations& x,
              const glm_tensor& results, float* products, float* kept) {
  const WeightMatrix matrix{args->down.experts[task.expert], args->down.format, args->down.cols};
  const WeightMatrix next_matrix{args->down.experts[next.expert], args->down.format, args->down.cols};
  const WeightRows w{matrix, task.row_begin, task.rows, next_matrix.row(next.row_begin)};
  for (int32_t begin = task.begin; begin < task.end; begin += kMatmulTokens) {
    const int32_t count = std::min(kMatmulTokens, task.end - begin);
    matmul(w, x, {args->order, 1}, begin, count, products, kept);
    for (int32_t i = 0; i < count; ++i) {
      store_act(products + i * task.rows, results.dtype, element(results, args->order[begin + i], task.row_begin),
                task.rows);
    }
  }
}

/* Columns [col, col + n) of row t; `sum` and `term` are scratch of kCombineCols each. */
void combine(const glm_moe_down_args* args, const glm_tensor& results, int64_t t, int32_t col, int32_t n, float* sum,
             float* term) {
  const auto* ids = static_cast<const int32_t*>(row_of(args->ids, t));
  const auto* weights = static_cast<const float*>(row_of(args->weights, t));
  if (args->base.data != nullptr) {
    load_floats(element(args->base, t, col), args->base.dtype, sum, n);
  } else {
    std::fill_n(sum, n, 0.0f);
  }
  for (int32_t j = 0; j < args->top_k; ++j) {
    if (ids[j] < args->down.first || ids[j] >= args->down.first + args->down.count) continue;
    load_floats(element(results, t * args->top_k + j, col), results.dtype, term, n);
    for (int32_t i = 0; i < n; ++i) sum[i] += weights[j] * term[i];
  }
  store_act(sum, args->out.dtype, element(args->out, t, col), n);
}

void combine_rows(glm_device* device, const glm_moe_down_args* args, const Scratch& scratch) {
  constexpr int64_t kElementsPerChunk = 16384;
  const glm_tensor results = scratch.result_rows(args);
  const int32_t pieces = (args->down.rows + kCombineCols - 1) / kCombineCols;
  const int64_t grain =
      kElementsPerChunk / (static_cast<int64_t>(args->top_k) * std::min(kCombineCols, args->down.rows)) + 1;
  parallel_for(device->pool, static_cast<int64_t>(args->rows) * pieces, grain,
               [&](int64_t begin, int64_t end, int thread) {
                 float* sum = scratch.combine + static_cast<size_t>(thread) * 2 * kCombineCols;
                 for (int64_t i = begin; i < end; ++i) {
                   const auto col = static_cast<int32_t>(i % pieces) * kCombineCols;
                   combine(args, results, i / pieces, col, std::min(kCombineCols, args->down.rows - col), sum,
                           sum + kCombineCols);
                 }
               });
}

/* Each assignment's product, to its row of `results`. */
void multiply(glm_device* device, const glm_moe_down_args* args, Scratch& scratch, const glm_tensor& results) {
  const Activations x =
      load_activations(device->pool, args->order, args->offsets[args->down.count], args->x, args->x_scale, scratch.x);
  scratch.tasks.plan(args->down, args->offsets, device->pool.num_threads());
  parallel_for(device->pool, scratch.tasks.num_tasks(), 1, [&](int64_t begin, int64_t end, int thread) {
    float* products = scratch.products + static_cast<size_t>(thread) * kMatmulOutFloats;
    for (int64_t i = begin; i < end; ++i)
      run_task(args, scratch.tasks[i], scratch.tasks.after(i), x, results, products, scratch.kept.of(thread));
  });
}

/* The same products, which nobody combines here. */
glm_moe_down_args uncombined(const glm_moe_down_each_args* args) {
  glm_moe_down_args down{};
  down.rows = args->rows;
  down.top_k = args->top_k;
  down.x = args->x;
  down.x_scale = args->x_scale;
  down.down = args->down;
  down.offsets = args->offsets;
  down.order = args->order;
  down.out = args->out;
  return down;
}

}  // namespace

size_t moe_down_workspace(const glm_device* device, const glm_moe_down_args* args) {
  return Scratch(nullptr, device, args).layout.bytes();
}

glm_status moe_down(glm_device* device, const glm_moe_down_args* args) {
  if (args->rows == 0) return GLM_OK;
  Scratch scratch(device->workspace, device, args);
  multiply(device, args, scratch, scratch.result_rows(args));
  combine_rows(device, args, scratch);
  return GLM_OK;
}

size_t moe_down_each_workspace(const glm_device* device, const glm_moe_down_each_args* args) {
  const glm_moe_down_args down = uncombined(args);
  return Scratch(nullptr, device, &down).layout.bytes();
}

glm_status moe_down_each(glm_device* device, const glm_moe_down_each_args* args) {
  if (args->rows == 0) return GLM_OK;
  const glm_moe_down_args down = uncombined(args);
  Scratch scratch(device->workspace, device, &down);
  multiply(device, &down, scratch, args->out);
  return GLM_OK;
}

GLM_CPU_END
