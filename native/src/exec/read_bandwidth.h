// How fast a table's device reads its memory at best: what profiles are held against.
#pragma once

#include <string>

#include "glm/kernels.h"

namespace glm {

// Bytes a second. A table whose memory is not the host's exports glm_<name>_read(device, data, bytes) for this; throws
// GLM_UNSUPPORTED if it does not.
double read_bandwidth(const std::string& kernels_path, const glm_device_options& options);

}  // namespace glm
