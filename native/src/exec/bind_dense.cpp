#include "exec/bind_op.h"
#include "support/dtype.h"

namespace glm {
namespace {

void check_scale_cols(const OpReader& op, std::string_view key, const glm_tensor& scale, int32_t cols) {
  if (scale.cols != 1 && scale.cols != blocks(cols)) {
    op.error(key, "has ", scale.cols, " columns, expected 1 or ", blocks(cols), " for ", cols, " columns");
  }
}

}  // namespace

TensorPair read_linear_input(OpReader& op, glm_weight_format format, int32_t cols, int32_t rows_each) {
  if (!is_fp8(format)) {
    if (op.has("x_scale")) op.error("x_scale", "does not belong to weights of format ", format_name(format));
    return {op.read_act("x", cols, rows_each), glm_tensor{}};
  }
  if (!op.has("x_scale")) op.error("x_scale", "expected one for weights of format ", format_name(format));
  const glm_tensor x = op.read("x", GLM_FP8_E4M3, cols, rows_each);
  return {x, op.read("x_scale", GLM_F32, format == GLM_W_FP8_BLOCK ? blocks(cols) : 1, rows_each)};
}

TensorPair write_quantized(OpReader& op, int32_t cols, int32_t rows_each) {
  if (op.has("q") != op.has("scale")) op.error("q", "expected q and scale, or neither");
  const glm_tensor q = op.write("q", GLM_FP8_E4M3, cols, rows_each);
  const glm_tensor scale = op.write("scale", GLM_F32, OpReader::kAnyCols, rows_each);
  if (scale.data != nullptr) check_scale_cols(op, "scale", scale, cols);
  return {q, scale};
}

void require_output(const OpReader& op, const glm_tensor& out, const glm_tensor& q) {
  if (out.data == nullptr && q.data == nullptr) op.error("out", "expected out, or q and scale");
}

OpArgs bind_embed(OpReader& op) {
  glm_embed_args args{};
  args.step = &op.resources().state.step;
  args.slots = &op.resources().state.slots;
  args.out = op.write_act("out", OpReader::kAnyCols);
  const Matrix& table = op.whole_matrix("table", args.out.cols);
  if (table.rows != args.slots->vocab)
    op.error("table", "has ", table.rows, " rows, expected vocab ", args.slots->vocab);
  args.table = table.parts[0];
  args.format = table.format;
  return args;
}

OpArgs bind_rms_norm(OpReader& op) {
  glm_rms_norm_args args{};
  args.residual = op.write_act("residual", OpReader::kAnyCols);
  const int32_t cols = args.residual.cols;
  args.delta = op.read_act("delta", cols);
  args.reduce = op.has("reduce") ? op.integer("reduce", 0, 1) : 0;
  if (args.reduce != 0 && args.delta.data == nullptr) op.error("reduce", "expected a delta to sum over the ranks");
  args.weight = op.vector("weight", cols);
  args.eps = op.non_negative("eps");
  args.out = op.write_act("out", cols);
  std::tie(args.q, args.scale) = write_quantized(op, cols, 1);
  require_output(op, args.out, args.q);
  return args;
}

OpArgs bind_quantize(OpReader& op) {
  glm_quantize_args args{};
  args.x = op.read_act("x", OpReader::kAnyCols);
  std::tie(args.q, args.scale) = write_quantized(op, args.x.cols, 1);
  return args;
}

OpArgs bind_linear(OpReader& op) {
  glm_linear_args args{};
  const Matrix& matrix = op.matrix("w", OpReader::kAnyCols);
  args.format = matrix.format;
  std::tie(args.x, args.x_scale) = read_linear_input(op, matrix.format, matrix.cols, 1);
  args.num_parts = static_cast<int32_t>(matrix.parts.size());
  for (size_t i = 0; i < matrix.parts.size(); ++i) {
    args.parts[i] = matrix.parts[i];
    args.bias[i] = matrix.bias[i];
  }
  const glm_dtype out = op.has_buffer("out", GLM_F32) ? GLM_F32 : op.resources().act;
  args.out = op.write("out", out, matrix.rows);
  return args;
}

OpArgs bind_silu_mul(OpReader& op) {
  glm_silu_mul_args args{};
  args.x = op.read_act("x", OpReader::kAnyCols);
  if (args.x.cols % 2 != 0) op.error("x", "has ", args.x.cols, " columns, expected an even number");
  args.out = op.write_act("out", args.x.cols / 2);
  std::tie(args.q, args.scale) = write_quantized(op, args.x.cols / 2, 1);
  require_output(op, args.out, args.q);
  return args;
}

OpArgs bind_all_reduce(OpReader& op) {
  glm_all_reduce_args args{};
  args.x = op.write_act("x", OpReader::kAnyCols);
  return args;
}

OpArgs bind_reduce_scatter(OpReader& op) {
  glm_reduce_scatter_args args{};
  args.x = op.write_act("x", OpReader::kAnyCols);
  return args;
}

OpArgs bind_all_gather(OpReader& op) {
  glm_all_gather_args args{};
  args.x = op.write_any("x");
  return args;
}

OpArgs bind_gather_rows(OpReader& op) {
  glm_gather_rows_args args{};
  args.step = &op.resources().state.step;
  args.x = op.read_all_rows("x");
  args.out = op.write_act("out", args.x.cols);
  return args;
}

OpArgs bind_sample(OpReader& op) {
  glm_sample_args args{};
  args.step = &op.resources().state.step;
  args.slots = &op.resources().state.slots;
  args.logits = op.write("logits", GLM_F32, OpReader::kAnyCols);
  const int32_t vocab = args.slots->vocab;
  if (!op.has("first") && args.logits.cols != vocab) {
    op.error("logits", "has ", args.logits.cols, " columns, expected vocab ", vocab, ", or first=...");
  }
  if (op.has("first")) args.first = op.integer("first", 0, vocab - args.logits.cols);
  if (args.first % 4 != 0) op.error("first", args.first, ", expected a multiple of 4");
  return args;
}

}  // namespace glm
