/* Where the threads of all ranks wait for each other and see each other's data. */
#ifndef GLM_CPU_RENDEZVOUS_H
#define GLM_CPU_RENDEZVOUS_H

#include <atomic>
#include <cstdint>
#include <memory>

namespace glm::cpu {

class Rendezvous {
 public:
  explicit Rendezvous(int num_ranks);

  int num_ranks() const { return num_ranks_; }

  /* Returns true once all ranks have come here; sleeps until then. False, now and ever after, if `abort` was called. */
  bool arrive();
  /* From any thread. */
  void abort();

  /* Before an arrival; read by others after it. */
  void publish(int rank, const void* data) { published_[rank] = data; }
  const void* published(int rank) const { return published_[rank]; }

 private:
  int num_ranks_;
  std::unique_ptr<const void*[]> published_; /* [num_ranks_] */
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<bool> aborted_{false};
};

}  // namespace glm::cpu

#endif
