#include "engine/exchange_log.h"

#include <algorithm>

#include "glm/runtime.h"
#include "support/error.h"

namespace glm {

void ExchangeLog::skip(uint64_t exchanges) {
  const std::lock_guard lock(mutex_);
  total_ += exchanges;
}

void ExchangeLog::add(uint64_t step, const Executor& plan, int32_t num_rows, int32_t num_samples) {
  if (num_rows == 0) return;
  const std::lock_guard lock(mutex_);
  steps_.push_back({step, &plan, num_samples > 0, total_});
  if (steps_.size() > GLM_MAX_IN_FLIGHT + 1) steps_.pop_front();
  total_ += plan.num_exchanges(num_samples > 0);
}

std::string ExchangeLog::place(uint64_t begun, bool waits) const {
  const std::lock_guard lock(mutex_);
  if (steps_.empty()) return "";
  const auto begins_before = [&](const Step& step) { return step.first < begun; };
  const auto newest = std::find_if(steps_.rbegin(), steps_.rend(), begins_before);
  const Step& step = newest == steps_.rend() ? steps_.front() : *newest;
  const std::vector<const BoundOp*> ops = step.plan->exchanges(step.samples);
  if (ops.empty()) return "";
  const uint64_t passed = begun > step.first ? std::min<uint64_t>(begun - step.first, ops.size()) : 0;
  if (passed == 0) return text("before ", describe(*ops.front()), " of step ", step.number);
  return text(waits ? "in " : "past ", describe(*ops[passed - 1]), " of step ", step.number);
}

}  // namespace glm
