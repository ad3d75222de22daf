// How many tokens each expert has been given since the engine was created, by the label of the moe_group that counts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "plan/plan.h"

namespace glm {

class ExpertLoads {
 public:
  ExpertLoads() = default;
  // A counter for each local expert of each moe_group, all 0. Ops of the two plans with one label share theirs.
  ExpertLoads(const Plan& mixed, const Plan& decode, Arena& arena);

  // The counters of an op: [its `count`]. NULL for a label or count that is not there.
  uint64_t* find(const std::string& label, int32_t count) const;
  // In order of the mixed plan's ops, then what the decode plan alone has.
  const uint64_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  struct Place {
    size_t first;
    int32_t count;
  };

  std::map<std::string, Place> places_;
  uint64_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace glm
