// The decode plan but for `sample` as graphs: recorded at start for a few numbers of rows (buckets), replayed in every step.
#pragma once

#include <cstdint>
#include <vector>

#include "exec/executor.h"
#include "glm/kernels.h"
#include "memory/device.h"

namespace glm {

class DecodeGraphs {
 public:
  // For buckets up to `max_rows`. `step` is what the plan's ops are bound to; its arrays hold `max_rows` rows of
  // padding, on which each bucket runs once before it is recorded: kernels are loaded while nothing is recorded.
  DecodeGraphs(const Device& device, Executor& decode, glm_step_inputs& step, int32_t max_rows);

  // The smallest bucket that holds `rows`, 1 to max_rows.
  size_t size() const { return graphs_.size(); }
  int32_t bucket(int32_t rows) const;
  // `rows` is a bucket.
  void launch(int32_t rows) const;

 private:
  size_t index(int32_t rows) const;

  std::vector<int32_t> buckets_;  // ascending
  std::vector<Graph> graphs_;     // beside buckets_
};

}  // namespace glm
