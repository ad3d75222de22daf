#include "weights/random_kv.h"

#include <string>

#include "support/dtype.h"

namespace glm {

std::vector<ScanRegion> random_kv_regions(const std::vector<glm_kv_layer>& layers, const Limits& limits) {
  constexpr float kUnitSpread = 1.7320508f;  // of an even distribution of variance 1
  std::vector<ScanRegion> regions;
  for (const glm_kv_layer& layer : layers) {
    for (void* pages : {layer.k, layer.v}) {
      const int64_t row_bytes = int64_t{layer.head_dim} * static_cast<int64_t>(element_bytes(layer.dtype));
      regions.push_back({.tensor = "KV pages",
                         .shard = "no file",
                         .file = nullptr,
                         .data = nullptr,
                         .synthetic = {.seed = regions.size(), .mean = 0, .spread = kUnitSpread},
                         .dtype = layer.dtype,
                         .rows = int64_t{limits.all_pages()} * layer.kv_heads * GLM_PAGE_SIZE,
                         .row_bytes = row_bytes,
                         .stride_bytes = row_bytes,
                         .first_index = 0,
                         .target = static_cast<std::byte*>(pages)});
    }
  }
  return regions;
}

}  // namespace glm
