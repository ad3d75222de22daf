#include "exec/bind_op.h"
#include "support/dtype.h"

namespace glm {
namespace {

constexpr int32_t kMaxTopK = 32;

void check_groups(const OpReader& op, const glm_moe_route_args& args) {
  if (args.experts % args.groups != 0) {
    op.error("groups", args.groups, ", expected a divisor of the ", args.experts, " experts");
  }
  const int32_t group_size = args.experts / args.groups;
  if (args.groups > 1 && group_size < 2) op.error("groups", args.groups, ", expected at least 2 experts a group");
  if (args.top_k > args.topk_groups * group_size) {
    op.error("top_k", args.top_k, ", expected at most ", args.topk_groups * group_size, ", what topk_groups leaves");
  }
}

}  // namespace

OpArgs bind_moe_route(OpReader& op) {
  glm_moe_route_args args{};
  args.x = op.read_act("x", OpReader::kAnyCols);
  const Matrix& weight = op.whole_matrix("w", args.x.cols);
  args.weight = weight.parts[0];
  args.format = weight.format;
  args.experts = weight.rows;
  args.bias = op.vector("bias", args.experts);
  args.top_k = op.integer("top_k", 1, std::min(kMaxTopK, args.experts));
  args.groups = op.integer("groups", 1, args.experts);
  args.topk_groups = op.integer("topk_groups", 1, args.groups);
  check_groups(op, args);
  args.normalize = op.integer("normalize", 0, 1);
  args.scale = op.positive("scale");
  args.ids = op.write("ids", GLM_I32, args.top_k);
  args.weights = op.write("weights", GLM_F32, args.top_k);
  args.places = op.places("placement", args.experts);
  return args;
}

OpArgs bind_moe_group(OpReader& op) {
  glm_moe_group_args args{};
  args.top_k = op.integer("top_k", 1, kMaxTopK);
  args.ids = op.read("ids", GLM_I32, args.top_k);
  args.first = op.integer("first", 0, INT32_MAX);
  args.count = op.integer("count", 1, INT32_MAX - args.first);
  args.offsets = op.write_ints("offsets", int64_t{args.count} + 1);
  args.order = op.write_ints("order", int64_t{op.max_rows()} * args.top_k);
  args.loads = op.expert_loads(args.count);
  args.step = &op.resources().state.step;
  args.spare_slot = op.resources().limits.spare_slot();
  return args;
}

OpArgs bind_moe_gate_up(OpReader& op) {
  glm_moe_gate_up_args args{};
  args.top_k = op.integer("top_k", 1, kMaxTopK);
  args.gate = op.experts("gate");
  args.up = op.experts("up");
  if (args.gate.format != args.up.format || args.gate.first != args.up.first || args.gate.count != args.up.count ||
      args.gate.rows != args.up.rows || args.gate.cols != args.up.cols) {
    op.error("up", "differs from gate in format, first, count or shape");
  }
  std::tie(args.x, args.x_scale) = read_linear_input(op, args.gate.format, args.gate.cols, 1);
  args.offsets = op.read_ints("offsets", int64_t{args.gate.count} + 1);
  args.order = op.read_ints("order", int64_t{op.max_rows()} * args.top_k);
  args.out = op.write_act("out", args.gate.rows, args.top_k);
  std::tie(args.q, args.scale) = write_quantized(op, args.gate.rows, args.top_k);
  require_output(op, args.out, args.q);
  return args;
}

OpArgs bind_moe_dispatch(OpReader& op) {
  glm_moe_dispatch_args args{};
  args.top_k = op.integer("top_k", 1, kMaxTopK);
  args.first = op.integer("first", 0, INT32_MAX);
  args.count = op.integer("count", 1, INT32_MAX - args.first);
  args.ids = op.write("ids", GLM_I32, args.top_k);
  const bool quantized = op.has("x_scale");
  args.x = op.write("x", quantized ? GLM_FP8_E4M3 : op.resources().act, OpReader::kAnyCols);
  args.x_scale = op.write("x_scale", GLM_F32, OpReader::kAnyCols);
  return args;
}

OpArgs bind_moe_down_each(OpReader& op) {
  glm_moe_down_each_args args{};
  args.top_k = op.integer("top_k", 1, kMaxTopK);
  args.down = op.experts("down");
  std::tie(args.x, args.x_scale) = read_linear_input(op, args.down.format, args.down.cols, args.top_k);
  args.offsets = op.read_ints("offsets", int64_t{args.down.count} + 1);
  args.order = op.read_ints("order", int64_t{op.max_rows()} * args.top_k);
  args.out = op.write_act("out", args.down.rows, args.top_k);
  return args;
}

OpArgs bind_moe_combine(OpReader& op) {
  glm_moe_combine_args args{};
  args.top_k = op.integer("top_k", 1, kMaxTopK);
  args.count = op.integer("count", 1, INT32_MAX);
  args.ids = op.read("ids", GLM_I32, args.top_k);
  args.weights = op.read("weights", GLM_F32, args.top_k);
  args.products = op.read_act("products", OpReader::kAnyCols, args.top_k);
  args.base = op.read_act("base", args.products.cols);
  args.out = op.write_act("out", args.products.cols);
  return args;
}

OpArgs bind_moe_down(OpReader& op) {
  glm_moe_down_args args{};
  args.top_k = op.integer("top_k", 1, kMaxTopK);
  args.down = op.experts("down");
  std::tie(args.x, args.x_scale) = read_linear_input(op, args.down.format, args.down.cols, args.top_k);
  args.offsets = op.read_ints("offsets", int64_t{args.down.count} + 1);
  args.order = op.read_ints("order", int64_t{op.max_rows()} * args.top_k);
  args.ids = op.read("ids", GLM_I32, args.top_k);
  args.weights = op.read("weights", GLM_F32, args.top_k);
  args.base = op.read_act("base", args.down.rows);
  args.out = op.write_act("out", args.down.rows);
  return args;
}

}  // namespace glm
