#include "kv_page.h"
#include "norm_row.h"
#include "ops.h"
#include "row_grain.h"
#include "thread_scratch.h"

GLM_CPU_BEGIN

namespace {

void rotate(float* x, const float* cosines, const float* sines, int32_t half) {
  for (int32_t i = 0; i < half; ++i) {
    const float low = x[i];
    const float high = x[i + half];
    x[i] = low * cosines[i] - high * sines[i];
    x[i + half] = high * cosines[i] + low * sines[i];
  }
}

void norm_and_rotate(const glm_qk_norm_rope_store_args& args, const float* weight, int32_t position, float* x) {
  if (weight != nullptr) normalize_row(x, weight, args.kv.head_dim, args.eps, args.qkv.dtype, x);
  const int32_t half = args.rotary_dim / 2;
  const int64_t angle = int64_t{position} * half;
  rotate(x, args.rope_cos + angle, args.rope_sin + angle, half);
}

void store_kv(const glm_kv_layer& kv, const float* x, void* pages, int64_t offset) {
  auto* to = static_cast<std::byte*>(pages) + offset;
  if (kv.dtype == GLM_FP8_E4M3) {
    fp8_encode(x, reinterpret_cast<uint8_t*>(to), static_cast<size_t>(kv.head_dim));
  } else {
    store_act(x, kv.dtype, to, kv.head_dim);
  }
}

/* x: the row's q, k and v in f32. */
void norm_rope_store_row(const glm_qk_norm_rope_store_args& args, int64_t row, float* x) {
  const glm_kv_layer& kv = args.kv;
  const int32_t position = args.step->positions[row];
  load_floats(row_of(args.qkv, row), args.qkv.dtype, x, args.qkv.cols);
  for (int32_t head = 0; head < args.heads; ++head) {
    norm_and_rotate(args, args.q_norm, position, x + head * kv.head_dim);
  }
  store_act(x, args.out.dtype, row_of(args.out, row), args.out.cols);
  float* k = x + args.heads * kv.head_dim;
  float* v = k + kv.kv_heads * kv.head_dim;
  const int32_t page = page_of(*args.slots, args.step->row_slots[row], position / GLM_PAGE_SIZE);
  const int64_t token = int64_t{position % GLM_PAGE_SIZE} * kv.head_dim * static_cast<int64_t>(dtype_bytes(kv.dtype));
  for (int32_t head = 0; head < kv.kv_heads; ++head) {
    norm_and_rotate(args, args.k_norm, position, k + head * kv.head_dim);
    const int64_t offset = kv_page_offset(kv, page, head) + token;
    store_kv(kv, k + head * kv.head_dim, kv.k, offset);
    store_kv(kv, v + head * kv.head_dim, kv.v, offset);
  }
}

}  // namespace

size_t qk_norm_rope_store_workspace(const glm_device* device, const glm_qk_norm_rope_store_args* args) {
  return ThreadScratch(device, nullptr, args->qkv.cols).bytes();
}

glm_status qk_norm_rope_store(glm_device* device, const glm_qk_norm_rope_store_args* args) {
  const ThreadScratch scratch(device, device->workspace, args->qkv.cols);
  parallel_for(device->pool, args->rows, row_grain(args->qkv.cols), [&](int64_t begin, int64_t end, int thread) {
    for (int64_t row = begin; row < end; ++row) norm_rope_store_row(*args, row, scratch.of(thread));
  });
  return GLM_OK;
}

GLM_CPU_END
