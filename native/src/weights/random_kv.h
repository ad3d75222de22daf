// Made-up keys and values: so that steps are measured at a context which nobody had to prefill.
#pragma once

#include <vector>

#include "glm/kernels.h"
#include "memory/limits.h"
#include "weights/scan.h"

namespace glm {

// What scan_weights fills all pages of `layers` from: mean 0, variance 1, other values in each layer.
std::vector<ScanRegion> random_kv_regions(const std::vector<glm_kv_layer>& layers, const Limits& limits);

}  // namespace glm
