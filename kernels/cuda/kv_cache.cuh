/* Where the keys and values of a token lie. */
#ifndef GLM_CUDA_KV_CACHE_CUH
#define GLM_CUDA_KV_CACHE_CUH

#include "numeric.cuh"

namespace glm::cuda {

struct KvPages {
  const int32_t* table; /* [slots][max_pages] */
  int32_t max_pages;
};

/* Elements before the key (or value) of `position` in `slot`, in a layer's K (or V). */
__device__ __forceinline__ int64_t token_offset(const glm_kv_layer& kv, const KvPages& pages, int32_t slot,
                                                int32_t kv_head, int32_t position) {
  const int64_t page = pages.table[static_cast<int64_t>(slot) * pages.max_pages + position / GLM_PAGE_SIZE];
  return ((page * kv.kv_heads + kv_head) * GLM_PAGE_SIZE + position % GLM_PAGE_SIZE) * kv.head_dim;
}

/* Calls f with the Type of a KV dtype. */
template <typename F>
auto with_kv(glm_dtype dtype, F&& f) {
  if (dtype == GLM_FP8_E4M3) return f(Type<fp8>{});
  return dtype == GLM_BF16 ? f(Type<bf16>{}) : f(Type<float>{});
}

}  // namespace glm::cuda

#endif
