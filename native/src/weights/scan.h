// One pass over all weights: finds NaN codes in FP8, and brings the bytes to where steps read them: into the device's
// memory, or, where that is the host's, from the file into its pages. What no file has is made up on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "memory/device.h"
#include "weights/mapped_file.h"
#include "weights/synthetic.h"

namespace glm {

// Rows of one tensor that a weight uses.
struct ScanRegion {
  std::string tensor;
  std::string shard;
  const MappedFile* file;  // NULL: synthetic, as `data`
  const std::byte* data;
  SyntheticValues synthetic;
  glm_dtype dtype;
  int64_t rows;
  int64_t row_bytes;
  int64_t stride_bytes;
  int64_t first_index;  // of data[0] in the tensor
  std::byte* target;    // in device memory, rows without a gap; NULL: used in place
};

// Bytes done and in all; called from any of the scanning threads, one at a time: first with none done, last with all.
using ScanProgress = std::function<void(uint64_t done, uint64_t total)>;

// Throws GLM_BAD_CHECKPOINT with tensor and index of a NaN.
void scan_weights(const std::vector<ScanRegion>& regions, const Device& device, int32_t num_threads,
                  const ScanProgress& progress);

}  // namespace glm
