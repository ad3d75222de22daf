// A compiled driver (driver.h of the C ABI), loaded, and one of its plans bound to the ops of an executor.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "exec/binder.h"
#include "exec/own_rows.h"
#include "glm/driver.h"
#include "memory/device.h"
#include "memory/limits.h"

namespace glm {

class Driver {
 public:
  // Throws GLM_UNSUPPORTED: no such object, or one of other versions.
  explicit Driver(const std::string& path);

  const glm_driver_plan& plan(const std::string& name) const {
    return name == "mixed" ? driver_->mixed : driver_->decode;
  }
  const std::string& path() const { return path_; }

 private:
  struct Unload {
    void operator()(void* object) const;
  };

  std::string path_;
  std::unique_ptr<void, Unload> object_;
  const glm_driver* driver_ = nullptr;
};

// Outlived by its driver, its device, its ops and its mark.
class BoundDriver {
 public:
  // Throws GLM_UNSUPPORTED if the driver is not of the plan that `ops` are of.
  BoundDriver(const Driver& driver, const std::string& plan, const Device& device, std::span<const BoundOp> ops,
              glm_driver_mark& mark, RankPlace place, const Limits& limits);
  ~BoundDriver();
  BoundDriver(const BoundDriver&) = delete;
  BoundDriver& operator=(const BoundDriver&) = delete;

  // The status of the op that failed; the mark says which. Throws GLM_INTERNAL for what a debug build finds.
  glm_status run_forward(int32_t num_rows, int32_t num_samples);
  glm_status run_sample(int32_t num_rows, int32_t num_samples);

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  void check(const glm_driver_fault& fault) const;

  const glm_driver_plan& plan_;
  std::span<const BoundOp> ops_;
  std::vector<glm_driver_op> handed_;
  std::vector<Line> context_;
};

}  // namespace glm
