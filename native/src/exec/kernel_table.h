// A kernel table and its device, open for as long as the object lives.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "exec/op_range.h"
#include "glm/kernels.h"
#include "plan/plan.h"

namespace glm {

class KernelTable {
 public:
  // Throws GLM_UNSUPPORTED: no such object, another version, or ops that a plan needs and the table lacks (all of
  // them).
  KernelTable(const std::string& path, const std::vector<const Plan*>& plans);

  void open_device(const glm_device_options& options);

  // What the object exports besides; NULL: nothing of that name.
  void* symbol(const std::string& name) const;
  // glm_NAME_range_begin and glm_NAME_range_end, where the object exports both.
  RangeCalls range_calls() const;

  const glm_kernels& kernels() const { return *kernels_; }
  glm_device* device() const { return device_.get(); }

 private:
  struct Unload {
    void operator()(void* object) const;
  };
  struct Close {
    const glm_kernels* kernels;
    void operator()(glm_device* device) const { kernels->device_close(device); }
  };

  std::unique_ptr<void, Unload> object_;  // before device_: unloaded after it is closed
  const glm_kernels* kernels_ = nullptr;
  std::unique_ptr<glm_device, Close> device_{nullptr, Close{nullptr}};
};

}  // namespace glm
