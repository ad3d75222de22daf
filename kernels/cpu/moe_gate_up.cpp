#include <algorithm>

#include "device.h"
#include "expert_tasks.h"
#include "float_math.h"
#include "ops.h"
#include "quantize_row.h"

GLM_CPU_BEGIN

namespace {

struct Scratch {
  Scratch(std::byte* base, const glm_device* device, const glm_moe_gate_up_args* args)
      : layout(base), tasks(layout, args->gate.count), pitch(padded(args->gate.rows)) {
    const auto threads = static_cast<size_t>(device->pool.num_threads());
    x = layout.take<float>(activation_floats(args->rows, args->x.cols));
    matmul = layout.take<float>(threads * matmul_scratch_floats());
    gate = layout.take<float>(threads * kMatmulOutFloats);
    y = args->q.data == nullptr ? nullptr : layout.take<float>(static_cast<size_t>(args->rows) * args->top_k * pitch);
  }
  WorkspaceLayout layout;
  ExpertTasks tasks;
  int64_t pitch;
  float* x;
  float* matmul;
  float* gate; /* one tile a thread */
  float* y;    /* [rows * top_k][pitch], where the whole row is needed to quantise it */
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

void run_task(const glm_moe_gate_up_args* args, const ExpertTask& task, const Activations& x, const Scratch& scratch,
              int thread) {
  const MatmulScratch local = matmul_scratch(scratch.matmul, thread);
  float* gate = scratch.gate + static_cast<size_t>(thread) * kMatmulOutFloats;
  const TokenList tokens{args->order, args->top_k};
  for (int32_t begin = task.begin; begin < task.end; begin += kPanelTokens) {
    const int32_t count = std::min(kPanelTokens, task.end - begin);
    const int32_t values = count * task.rows;
    matmul({args->gate.experts[task.expert], args->gate.format, args->gate.cols}, task.row_begin, task.rows, x, tokens,
           begin, count, local);
    std::copy_n(local.out, values, gate);
    matmul({args->up.experts[task.expert], args->up.format, args->up.cols}, task.row_begin, task.rows, x, tokens, begin,
           count, local);
    apply_swiglu(gate, local.out, values, args->out.dtype);
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
    for (int64_t i = begin; i < end; ++i) run_task(args, scratch.tasks[i], x, scratch, thread);
  });
  if (args->q.data != nullptr) quantize_rows(device, args, scratch);
  return GLM_OK;
}

GLM_CPU_END
