#include "exec/kernel_table.h"

#include <dlfcn.h>

#include "exec/ops.h"
#include "plan/op_form.h"
#include "support/error.h"

namespace glm {
namespace {

void check_ops(const glm_kernels& kernels, const std::vector<const Plan*>& plans) {
  std::string missing;
  for (int32_t kind = 0; kind < GLM_OP_COUNT; ++kind) {
    const auto op = static_cast<glm_op>(kind);
    if (has_op(kernels, op)) continue;
    int32_t calls = 0;
    for (const Plan* plan : plans) {
      for (const OpSpec& spec : plan->ops) calls += spec.kind == op;
    }
    if (calls > 0) missing += text(missing.empty() ? "" : ", ", op_form(op).name, " (", calls, " calls)");
  }
  if (!missing.empty()) {
    fail(GLM_UNSUPPORTED, "kernel table ", kernels.name, " lacks ops that the plans need: ", missing);
  }
}

}  // namespace

void KernelTable::Unload::operator()(void* object) const {
  dlclose(object);
}

KernelTable::KernelTable(const std::string& path, const std::vector<const Plan*>& plans)
    : object_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (!object_) fail(GLM_UNSUPPORTED, "kernel table ", path, " cannot be loaded: ", dlerror());
  using Query = const glm_kernels* (*)(uint32_t);
  const auto query = reinterpret_cast<Query>(dlsym(object_.get(), "glm_kernels_query"));
  if (query == nullptr) fail(GLM_UNSUPPORTED, "kernel table ", path, " does not export glm_kernels_query");
  kernels_ = query(GLM_KERNELS_VERSION);
  if (kernels_ == nullptr || kernels_->version != GLM_KERNELS_VERSION) {
    fail(GLM_UNSUPPORTED, "kernel table ", path, " does not speak version ", GLM_KERNELS_VERSION);
  }
  check_ops(*kernels_, plans);
}

void KernelTable::open_device(const glm_device_options& options) {
  glm_device* device = nullptr;
  char error[512] = "";
  const glm_status status = kernels_->device_open(&options, &device, error, sizeof(error));
  if (status != GLM_OK) fail(status, "kernel table ", kernels_->name, ": device ", options.ordinal, ": ", error);
  device_ = {device, Close{kernels_}};
}

RangeCalls KernelTable::range_calls() const {
  const std::string prefix = text("glm_", kernels_->name, "_range_");
  const RangeCalls calls{reinterpret_cast<void (*)(const char*)>(symbol(prefix + "begin")),
                         reinterpret_cast<void (*)()>(symbol(prefix + "end"))};
  return calls.begin != nullptr && calls.end != nullptr ? calls : RangeCalls{};
}

void* KernelTable::symbol(const std::string& name) const {
  return dlsym(object_.get(), name.c_str());
}

}  // namespace glm
