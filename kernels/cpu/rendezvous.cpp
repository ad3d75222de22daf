#include "rendezvous.h"

namespace glm::cpu {

Rendezvous::Rendezvous(int num_ranks) : num_ranks_(num_ranks), published_(new const void*[num_ranks]()) {}

bool Rendezvous::arrive() {
  const uint32_t round = round_.load();
  if (aborted_.load()) return false;
  if (arrived_.fetch_add(1) + 1 == num_ranks_) {
    arrived_.store(0);
    round_.fetch_add(1);
    round_.notify_all();
  } else {
    while (round_.load() == round) round_.wait(round);
  }
  return !aborted_.load();
}

void Rendezvous::abort() {
  aborted_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
}

}  // namespace glm::cpu
