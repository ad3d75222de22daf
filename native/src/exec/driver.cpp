#include "exec/driver.h"

#include <dlfcn.h>

#include "exec/executor.h"
#include "support/error.h"

namespace glm {
namespace {

constexpr const char* kRemedy = ": compile it again (`glm worker --executor terra` does)";

glm_driver_op handed_over(const BoundOp& op) {
  const void* args = std::visit([](const auto& typed) -> const void* { return &typed; }, op.args);
  return {static_cast<glm_op>(op.args.index()), args, &op};
}

}  // namespace

void Driver::Unload::operator()(void* object) const {
  dlclose(object);
}

Driver::Driver(const std::string& path) : path_(path), object_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (!object_) fail(GLM_UNSUPPORTED, "driver ", path, " cannot be loaded: ", dlerror());
  using Query = const glm_driver* (*)(uint32_t);
  const auto query = reinterpret_cast<Query>(dlsym(object_.get(), "glm_driver_query"));
  if (query == nullptr) fail(GLM_UNSUPPORTED, "driver ", path, " does not export glm_driver_query");
  driver_ = query(GLM_DRIVER_VERSION);
  if (driver_ == nullptr || driver_->version != GLM_DRIVER_VERSION) {
    fail(GLM_UNSUPPORTED, "driver ", path, " does not speak version ", GLM_DRIVER_VERSION, kRemedy);
  }
  if (driver_->kernels_version != GLM_KERNELS_VERSION) {
    fail(GLM_UNSUPPORTED, "driver ", path, " calls kernels of version ", driver_->kernels_version, ", expected ",
         GLM_KERNELS_VERSION, kRemedy);
  }
}

BoundDriver::BoundDriver(const Driver& driver, const std::string& plan, const Device& device,
                         std::span<const BoundOp> ops, glm_driver_mark& mark, RankPlace place, const Limits& limits)
    : plan_(driver.plan(plan)), ops_(ops), context_((plan_.context_bytes + sizeof(Line) - 1) / sizeof(Line)) {
  for (const BoundOp& op : ops) handed_.push_back(handed_over(op));
  const glm_driver_binding binding{.kernels = &device.kernels(),
                                   .device = device.handle(),
                                   .mark = &mark,
                                   .ops = handed_.data(),
                                   .num_ops = static_cast<int32_t>(handed_.size()),
                                   .rank = place.rank,
                                   .num_ranks = place.num_ranks,
                                   .max_rows = limits.max_rows,
                                   .max_samples = limits.max_samples};
  glm_driver_fault fault{-1, nullptr};
  const glm_status status = plan_.start(context_.data(), &binding, &fault);
  if (status == GLM_OK) return;
  const auto at = static_cast<size_t>(fault.op);
  const std::string where = fault.op < 0 || at >= ops.size() ? "" : text(describe(ops[at]), ": ");
  fail(GLM_UNSUPPORTED, "driver ", driver.path(), " is not of this ", plan, " plan: ", where, fault.what, " differs",
       kRemedy);
}

BoundDriver::~BoundDriver() {
  plan_.stop(context_.data());
}

void BoundDriver::check(const glm_driver_fault& fault) const {
  if (fault.what == nullptr) return;
  const std::string where = fault.op < 0 ? "the driver" : describe(ops_[static_cast<size_t>(fault.op)]);
  fail(GLM_INTERNAL, where, ": check of a debug build failed: ", fault.what);
}

glm_status BoundDriver::run_forward(int32_t num_rows, int32_t num_samples) {
  glm_driver_fault fault{-1, nullptr};
  const glm_status status = plan_.forward(context_.data(), num_rows, num_samples, &fault);
  check(fault);
  return status;
}

glm_status BoundDriver::run_sample(int32_t num_rows, int32_t num_samples) {
  glm_driver_fault fault{-1, nullptr};
  const glm_status status = plan_.sample(context_.data(), num_rows, num_samples, &fault);
  check(fault);
  return status;
}

}  // namespace glm
