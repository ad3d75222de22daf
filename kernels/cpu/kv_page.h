/* Where a KV page holds a token: [pages][kv_heads][GLM_PAGE_SIZE][head_dim]. */
#ifndef GLM_CPU_KV_PAGE_H
#define GLM_CPU_KV_PAGE_H

#include "tensor_access.h"

GLM_CPU_BEGIN

/* Bytes from the start of a layer's K (or V) to the first token of one head's part of a page. */
inline int64_t kv_page_offset(const glm_kv_layer& kv, int64_t page, int64_t kv_head) {
  return (page * kv.kv_heads + kv_head) * GLM_PAGE_SIZE * kv.head_dim * static_cast<int64_t>(dtype_bytes(kv.dtype));
}

inline int32_t page_of(const glm_slots& slots, int32_t slot, int32_t page_index) {
  return slots.page_table[static_cast<int64_t>(slot) * slots.max_pages + page_index];
}

GLM_CPU_END

#endif
