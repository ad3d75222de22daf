#include <algorithm>

#include "device.h"
#include "expert_tasks.h"
#include "float_math.h"
#include "kept_tile.h"
#include "ops.h"
#include "quantize_row.h"

GLM_CPU_BEGIN

namespace {

struct Scratch {
  Scratch(std::byte* base, const glm_device* device, const glm_moe_gate_up_args* args)
      : layout(base),
        tasks(layout, args->gate.count),
        kept(layout, device->pool.num_threads(), args->gate.cols),
        pitch(padded(args->gate.rows)) {
    const auto threads = static_cast<size_t>(device->pool.num_threads());
    x = layout.take<float>(activation_floats(args->rows, args->x.cols));
    gate_up = layout.take<float>(threads * 2 * kMatmulOutFloats);
    y = args->q.data == nullptr ? nullptr : layout.take<float>(static_cast<size_t>(args->rows) * args->top_k * pitch);
  }
  WorkspaceLayout layout;
  ExpertTasks tasks;
  KeptWeights kept;
  int64_t pitch;
  float* x;
  float* gate_up; /* two blocks of results a thread */
  float* y;       /* [rows * top_k][pitch], where the whole row is needed to quantise it */
};

/* gate := silu(gate) * up, each step rounded as a store would. */
void apply_swiglu(float* gate, const float* up, int64_t n, glm_dtype act) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = round_to_act(silu_f32(round_to_act(gate[i], act)), act);
    gate[i] = round_to_act(g * round_to_act(up[i], act), act);
  }
}

void store_tile(const glm_moe_gate_up_args* args, const Scratch& scratch, const ExpertTask& task, const int32_t* order,
                int32_t count, const float* tile) {
  const auto bytes = static_cast<int64_t>(dtype_bytes(args->out.dtype));
  for (int32_t i = 0; i < count; ++i, tile += task.rows) {
    if (args->out.data != nullptr) {
      auto* row = static_cast<std::byte*>(row_of(args->out, order[i]));
      store_act(tile, args->out.dtype, row + task.row_begin * bytes, task.rows);
    }
    if (scratch.y != nullptr) std::copy_n(tile, task.rows, scratch.y + order[i] * scratch.pitch + task.row_begin);
  }
}

/* next: the task that this thread will probably run after this one. */
void run_task(const glm_moe_gate_up_args* args, const ExpertTask& task, const ExpertTask& next, const Activations& x,
              const Scratch& scratch, int thread) {
  float* gate = scratch.gate_up + static_cast<size_t>(thread) * 2 * kMatmulOutFloats;
  float* up = gate + kMatmulOutFloats;
  const TokenList tokens{args->order, args->top_k};
  const WeightMatrix gate_matrix{args->gate.experts[task.expert], args->gate.format, args->gate.cols};
  const WeightMatrix up_matrix{args->up.experts[task.expert], args->up.format, args->up.cols};
  const WeightMatrix next_gate{args->gate.experts[next.expert], args->gate.format, args->gate.cols};
  const WeightRows gate_rows{gate_matrix, task.row_begin, task.rows, up_matrix.row(task.row_begin)};
  const WeightRows up_rows{up_matrix, task.row_begin, task.rows, next_gate.row(next.row_begin)};
  for (int32_t begin = task.begin; begin < task.end; begin += kMatmulTokens) {
    const int32_t count = std::min(kMatmulTokens, task.end - begin);
    matmul(gate_rows, x, tokens, begin, count, gate, scratch.kept.of(thread));
    matmul(up_rows, x, tokens, begin, count, up, scratch.kept.of(thread));
    apply_swiglu(gate, up, count * task.rows, args->out.dtype);
    store_tile(args, scratch, task, args->order + begin, count, gate);
  }
}

void quantize_rows(glm_device* device, const glm_moe_gate_up_args* args, const Scratch& scratch) {
  constexpr int64_t kRowsPerChunk = 4;
  const int32_t assignments = args->offsets[args->gate.count];
  parallel_for(device->pool, assignments, kRowsPerChunk, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t a = args->order[i];
      quantize_row(scratch.y + a * scratch.pitch, args->q.cols, args->scale.cols,
                   static_cast<uint8_t*>(row_of(args->q, a)), static_cast<float*>(row_of(args->scale, a)));
    }
  });
}

}  // namespace

size_t moe_gate_up_workspace(const glm_device* device, const glm_moe_gate_up_args* args) {
  return Scratch(nullptr, device, args).layout.bytes();
}

glm_status moe_gate_up(glm_device* device, const glm_moe_gate_up_args* args) {
  if (args->rows == 0) return GLM_OK;
  Scratch scratch(device->workspace, device, args);
  const Activations x = load_activations(device->pool, nullptr, args->rows, args->x, args->x_scale, scratch.x);
  scratch.tasks.plan(args->gate, args->offsets, device->pool.num_threads());
  parallel_for(device->pool, scratch.tasks.num_tasks(), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) run_task(args, scratch.tasks[i], scratch.tasks.after(i), x, scratch, thread);
  });
  if (args->q.data != nullptr) quantize_rows(device, args, scratch);
  return GLM_OK;
}

GLM_CPU_END
