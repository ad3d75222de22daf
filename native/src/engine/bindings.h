// Brings slot bindings to the device, in order with steps and without waiting for them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "glm/runtime.h"
#include "memory/arena.h"
#include "memory/device.h"

namespace glm {

struct SlotBinding {
  int32_t slot;
  glm_sampling sampling;
  std::vector<int32_t> prompt;
  std::vector<int32_t> sampled;
};

class SlotBinder {
 public:
  SlotBinder(const Device& device, const glm_slots& slots, Arena& host_arena);

  // The engine's thread. Waits for the device only where more bindings than places follow one another.
  void apply(const SlotBinding& binding);

 private:
  static constexpr size_t kPlaces = 16;
  struct Place {
    glm_sampling* sampling;
    uint16_t* counts;  // [vocab]
    Event passed;
  };

  void send_counts(const SlotBinding& binding, const Place& place);

  const Device& device_;
  const glm_slots& slots_;
  std::vector<Place> places_;
  size_t next_ = 0;
};

}  // namespace glm
