// Walks the list of bound ops.
#pragma once

#include <cstdint>
#include <vector>

#include "exec/binder.h"
#include "memory/device.h"

namespace glm {

const char* status_name(glm_status status);

class Executor {
 public:
  Executor(const Device& device, std::vector<BoundOp> ops) : device_(&device), ops_(std::move(ops)) {}

  // The largest scratch that any op needs.
  size_t workspace_bytes() const;

  // Calls every op in order. Throws GLM_DEVICE_ERROR or GLM_INTERNAL with the op's label at the first that fails.
  void run(int32_t num_rows, int32_t num_samples);

 private:
  const Device* device_;
  std::vector<BoundOp> ops_;
};

}  // namespace glm
