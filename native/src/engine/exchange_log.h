// Which op a device is at, from how many exchanges between ranks it has begun: the host has handed over whole steps.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "exec/executor.h"

namespace glm {

class ExchangeLog {
 public:
  // By the engine's thread, in order: exchanges outside of steps, and those of a step.
  void skip(uint64_t exchanges);
  void add(uint64_t step, const Executor& plan, int32_t num_rows, int32_t num_samples);

  // From any thread. "in op ... of step 7" if the device `waits` in the exchange begun last, else "past op ..." or
  // "before op ...". Empty if no step has an exchange.
  std::string place(uint64_t begun, bool waits) const;

 private:
  struct Step {
    uint64_t number;
    const Executor* plan;
    bool samples;
    uint64_t first;  // exchanges before it
  };

  mutable std::mutex mutex_;
  std::deque<Step> steps_;  // guarded by mutex_: the newest
  uint64_t total_ = 0;      // guarded by mutex_
};

}  // namespace glm
