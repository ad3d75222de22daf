#include "exec/bind_op.h"

namespace glm {
namespace {

// Query heads: a multiple of the KV heads, so that each KV head serves as many.
int32_t read_heads(const OpReader& op, const glm_kv_layer& kv) {
  const int32_t heads = op.integer("heads", 1, INT32_MAX / kv.head_dim - 2 * kv.kv_heads);
  if (heads % kv.kv_heads != 0) op.error("heads", heads, ", expected a multiple of the ", kv.kv_heads, " KV heads");
  return heads;
}

}  // namespace

OpArgs bind_qk_norm_rope_store(OpReader& op) {
  glm_qk_norm_rope_store_args args{};
  args.step = &op.resources().state.step;
  args.slots = &op.resources().state.slots;
  args.kv = op.kv_layer("layer");
  args.heads = read_heads(op, args.kv);
  args.qkv = op.read_act("qkv", (args.heads + 2 * args.kv.kv_heads) * args.kv.head_dim);
  if (op.has("q_norm") != op.has("k_norm") || op.has("q_norm") != op.has("eps")) {
    op.error("q_norm", "expected q_norm, k_norm and eps, or none of them");
  }
  args.q_norm = op.vector("q_norm", args.kv.head_dim);
  args.k_norm = op.vector("k_norm", args.kv.head_dim);
  if (op.has("eps")) args.eps = op.non_negative("eps");
  const Rope& rope = op.rope("rope");
  if (rope.rotary_dim > args.kv.head_dim) {
    op.error("rope", "rotates ", rope.rotary_dim, " dimensions, expected at most head_dim ", args.kv.head_dim);
  }
  args.rotary_dim = rope.rotary_dim;
  args.rope_cos = rope.cos;
  args.rope_sin = rope.sin;
  args.out = op.write_act("out", args.heads * args.kv.head_dim);
  return args;
}

OpArgs bind_paged_attention(OpReader& op) {
  glm_paged_attention_args args{};
  args.step = &op.resources().state.step;
  args.slots = &op.resources().state.slots;
  args.kv = op.kv_layer("layer");
  args.heads = read_heads(op, args.kv);
  args.q = op.read_act("q", args.heads * args.kv.head_dim);
  args.softmax_scale = op.positive("softmax_scale");
  args.out = op.write_act("out", args.heads * args.kv.head_dim);
  return args;
}

}  // namespace glm
