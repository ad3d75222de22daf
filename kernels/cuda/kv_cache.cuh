/* Where the keys and values of a token lie. */
#ifndef GLM_CUDA_KV_CACHE_CUH
#define GLM_CUDA_KV_CACHE_CUH

#include "numeric.cuh"

namespace glm::cuda {

struct KvPages {
  const int32_t* table; /* [slots][max_pages] */
  int32_t max_pages;
};

/* The page that holds `position` of `slot`. */
__device__ __forceinline__ int32_t page_of(const KvPages& pages, int32_t slot, int32_t position) {
  return pages.table[static_cast<int64_t>(slot) * pages.max_pages + position / GLM_PAGE_SIZE];
}

/* Elements before the key (or value) of `position`, which `page` holds, in a layer's K (or V). */
__device__ __forceinline__ int64_t offset_in(const glm_kv_layer& kv, int64_t page, int32_t kv_head, int32_t position) {
  return ((page * kv.kv_heads + kv_head) * GLM_PAGE_SIZE + position % GLM_PAGE_SIZE) * kv.head_dim;
}

__device__ __forceinline__ int64_t token_offset(const glm_kv_layer& kv, const KvPages& pages, int32_t slot,
                                                int32_t kv_head, int32_t position) {
  return offset_in(kv, page_of(pages, slot, position), kv_head, position);
}

/* Calls f with the Type of a KV dtype. */
template <typename F>
auto with_kv(glm_dtype dtype, F&& f) {
  if (dtype == GLM_FP8_E4M3) return f(Type<fp8>{});
  return dtype == GLM_BF16 ? f(Type<bf16>{}) : f(Type<float>{});
}

}  // namespace glm::cuda

#endif
