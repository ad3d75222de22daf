#include "device.h"
#include "ops.h"
#include "quantize_row.h"
#include "tensor_access.h"
#include "workspace.h"

GLM_CPU_BEGIN

namespace {

constexpr int64_t kRowsPerChunk = 4;

struct Scratch {
  Scratch(std::byte* base, int num_threads, int32_t cols) : layout(base), pitch((cols + 15) / 16 * 16) {
    rows = layout.take<float>(static_cast<size_t>(num_threads) * pitch);
  }
  WorkspaceLayout layout;
  size_t pitch;
  float* rows; /* one a thread */
};

}  // namespace

size_t quantize_workspace(const glm_device* device, const glm_quantize_args* args) {
  return Scratch(nullptr, device->pool.num_threads(), args->x.cols).layout.bytes();
}

glm_status quantize(glm_device* device, const glm_quantize_args* args) {
  const Scratch scratch(device->workspace, device->pool.num_threads(), args->x.cols);
  parallel_for(device->pool, args->rows, kRowsPerChunk, [&](int64_t begin, int64_t end, int thread) {
    float* x = scratch.rows + static_cast<size_t>(thread) * scratch.pitch;
    for (int64_t row = begin; row < end; ++row) {
      load_floats(row_of(args->x, row), args->x.dtype, x, args->x.cols);
      quantize_row(x, args->x.cols, args->scale.cols, static_cast<uint8_t*>(row_of(args->q, row)),
                   static_cast<float*>(row_of(args->scale, row)));
    }
  });
  return GLM_OK;
}

GLM_CPU_END
