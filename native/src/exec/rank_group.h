// The group through which the devices of several ranks exchange data.
#pragma once

#include <vector>

#include "memory/device.h"

namespace glm {

class RankGroup {
 public:
  RankGroup() = default;  // of one rank: it has nobody to exchange data with
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  // By rank. Throws GLM_UNSUPPORTED if the table has no groups.
  void create(const std::vector<const Device*>& devices);
  // From any thread: ranks that wait for others, now or later, fail instead.
  void abort();
  // By rank: exchanges begun by its device. Empty if the table's operations have ended when they return.
  std::vector<uint64_t> progress() const;

 private:
  const glm_kernels* kernels_ = nullptr;
  glm_group* group_ = nullptr;
  size_t num_ranks_ = 0;
};

}  // namespace glm
