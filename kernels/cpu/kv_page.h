/* Where a KV page holds a token: [pages][kv_heads][GLM_PAGE_SIZE][head_dim]. */
#ifndef GLM_CPU_KV_PAGE_H
#define GLM_CPU_KV_PAGE_H

#include "weight_loader.h"

GLM_CPU_BEGIN

/* Bytes from the start of a layer's K (or V) to the first token of one head's part of a page. */
inline int64_t kv_page_offset(const glm_kv_layer& kv, int64_t page, int64_t kv_head) {
  return (page * kv.kv_heads + kv_head) * GLM_PAGE_SIZE * kv.head_dim * static_cast<int64_t>(dtype_bytes(kv.dtype));
}

inline int32_t page_of(const glm_slots& slots, int32_t slot, int32_t page_index) {
  return slots.page_table[static_cast<int64_t>(slot) * slots.max_pages + page_index];
}

#if defined(__AVX2__)
/* kLanes FP8 codes. A code's fields lie where a float has them, 2^120 too small: the biases are 7 and 127. */
inline F32 load_fp8(const uint8_t* p) {
#if defined(__AVX512F__)
  const auto codes = reinterpret_cast<I32>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  const auto codes = reinterpret_cast<I32>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
  const I32 magnitude = codes & 0x7f;
  const F32 value = reinterpret_cast<F32>(magnitude << 20) * broadcast(0x1p120f);
  const I32 nan = (magnitude == 0x7f) & 0x7fc00000;
  return reinterpret_cast<F32>(reinterpret_cast<I32>(value) | nan | (codes & 0x80) << 24);
}
#endif

/* n values of a KV dtype. */
inline void load_kv(const void* in, glm_dtype dtype, float* out, int n) {
#if defined(__AVX2__)
  if (dtype == GLM_BF16 && n % kLanes == 0) {
    for (int i = 0; i < n; i += kLanes) store(out + i, Bf16Loader::fetch(static_cast<const uint16_t*>(in) + i));
    return;
  }
  if (dtype == GLM_FP8_E4M3 && n % kLanes == 0) {
    for (int i = 0; i < n; i += kLanes) store(out + i, load_fp8(static_cast<const uint8_t*>(in) + i));
    return;
  }
#endif
  load_floats(in, dtype, out, n);
}

GLM_CPU_END

#endif
