#include "engine/bindings.h"

#include <algorithm>

namespace glm {
namespace {

// Layout of glm_slots.counts.
constexpr uint16_t kInPrompt = 0x8000;
constexpr uint16_t kTimesSampled = 0x7fff;

}  // namespace

SlotBinder::SlotBinder(const Device& device, const glm_slots& slots, Arena& host_arena)
    : device_(device), slots_(slots) {
  for (size_t i = 0; i < kPlaces; ++i) {
    places_.push_back({.sampling = host_arena.allocate<glm_sampling>("a binding's sampling state", {1}),
                       .counts = host_arena.allocate<uint16_t>("a binding's token counts", {slots.vocab}),
                       .passed = Event(device)});
  }
}

void SlotBinder::apply(const SlotBinding& binding) {
  Place& place = places_[next_++ % kPlaces];
  place.passed.wait();
  *place.sampling = binding.sampling;
  device_.copy_in(slots_.sampling + binding.slot, place.sampling, sizeof(glm_sampling));
  // A valid id, though no row may ask for it before a step has sampled.
  device_.fill(slots_.last_token + binding.slot, 0, sizeof(int32_t));
  send_counts(binding, place);
  place.passed.record();
}

void SlotBinder::send_counts(const SlotBinding& binding, const Place& place) {
  uint16_t* to = slots_.counts + int64_t{binding.slot} * slots_.vocab;
  const size_t bytes = static_cast<size_t>(slots_.vocab) * sizeof(uint16_t);
  if (binding.prompt.empty() && binding.sampled.empty()) {
    device_.fill(to, 0, bytes);
    return;
  }
  std::fill_n(place.counts, slots_.vocab, uint16_t{0});
  for (const int32_t token : binding.prompt) place.counts[token] |= kInPrompt;
  for (const int32_t token : binding.sampled) {
    if ((place.counts[token] & kTimesSampled) != kTimesSampled) ++place.counts[token];
  }
  device_.copy_in(to, place.counts, bytes);
}

}  // namespace glm
