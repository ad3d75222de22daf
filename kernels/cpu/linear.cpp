#include <algorithm>

#include "device.h"
#include "kept_tile.h"
#include "matmul.h"
#include "ops.h"
#include "workspace.h"

GLM_CPU_BEGIN

namespace {

struct Scratch {
  Scratch(std::byte* base, const glm_device* device, const glm_linear_args* args)
      : layout(base), kept(layout, device->pool.num_threads(), args->x.cols) {
    x = layout.take<float>(activation_floats(args->rows, args->x.cols));
    out = layout.take<float>(static_cast<size_t>(device->pool.num_threads()) * kMatmulOutFloats);
  }
  WorkspaceLayout layout;
  KeptWeights kept;
  float* x;
  float* out; /* one block of results a thread */
};

/* Rows [begin, begin + rows) of a part, to columns from `out_col` on. */
struct Block {
  int32_t part;
  int32_t begin;
  int32_t rows;
  int64_t out_col;
};

Block find_block(const glm_linear_args* args, const int32_t* row_blocks, int64_t index) {
  int64_t out_col = 0;
  for (int32_t part = 0;; ++part) {
    const int32_t part_rows = args->parts[part].rows;
    const int64_t blocks = (part_rows + row_blocks[part] - 1) / row_blocks[part];
    if (index < blocks) {
      const auto begin = static_cast<int32_t>(index * row_blocks[part]);
      return {part, begin, std::min(row_blocks[part], part_rows - begin), out_col + begin};
    }
    index -= blocks;
    out_col += part_rows;
  }
}

void store_block(const glm_linear_args* args, const Block& block, int64_t token_begin, int32_t tokens, float* values) {
  const float* bias = args->bias[block.part];
  for (int32_t t = 0; t < tokens; ++t, values += block.rows) {
    if (bias != nullptr) {
      for (int32_t r = 0; r < block.rows; ++r) values[r] += bias[block.begin + r];
    }
    auto* row = static_cast<std::byte*>(row_of(args->out, token_begin + t));
    store_act(values, args->out.dtype, row + block.out_col * static_cast<int64_t>(dtype_bytes(args->out.dtype)),
              block.rows);
  }
}

}  // namespace

size_t linear_workspace(const glm_device* device, const glm_linear_args* args) {
  return Scratch(nullptr, device, args).layout.bytes();
}

glm_status linear(glm_device* device, const glm_linear_args* args) {
  if (args->rows == 0) return GLM_OK;
  const Scratch scratch(device->workspace, device, args);
  const Activations x = load_activations(device->pool, nullptr, args->rows, args->x, args->x_scale, scratch.x);
  const int threads = device->pool.num_threads();
  int32_t row_blocks[GLM_MAX_PARTS];
  int64_t blocks = 0;
  for (int32_t part = 0; part < args->num_parts; ++part) {
    const int32_t rows = args->parts[part].rows;
    row_blocks[part] = matmul_row_block(args->format, rows, args->x.cols, 1, args->rows, threads);
    blocks += (rows + row_blocks[part] - 1) / row_blocks[part];
  }
  parallel_for(device->pool, blocks, 1, [&](int64_t begin, int64_t end, int thread) {
    float* out = scratch.out + static_cast<size_t>(thread) * kMatmulOutFloats;
    for (int64_t i = begin; i < end; ++i) {
      const Block block = find_block(args, row_blocks, i);
      const WeightMatrix matrix{args->parts[block.part], args->format, args->x.cols};
      const WeightRows w{matrix, block.begin, block.rows, matrix.row(block.begin + block.rows)};
      for (int64_t t = 0; t < args->rows; t += kMatmulTokens) {
        const auto tokens = static_cast<int32_t>(std::min<int64_t>(kMatmulTokens, args->rows - t));
        matmul(w, x, {nullptr, 1}, t, tokens, out, scratch.kept.of(thread));
        store_block(args, block, t, tokens, out);
      }
    }
  });
  return GLM_OK;
}

GLM_CPU_END
