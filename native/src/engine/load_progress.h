// What several ranks have loaded, told as one.
#pragma once

#include <cstdint>
#include <mutex>
#include <numeric>
#include <vector>

#include "glm/runtime.h"

namespace glm {

class LoadProgress {
 public:
  LoadProgress(const glm_engine_options& options, size_t num_ranks)
      : options_(options), done_(num_ranks), total_(num_ranks) {}

  // From any of the ranks' loading threads. A rank that has told nothing yet counts as much as the others do on average.
  void tell(size_t rank, uint64_t done, uint64_t total) {
    if (options_.progress == nullptr) return;
    const std::lock_guard lock(mutex_);
    if (total_[rank] == 0) ++told_;
    done_[rank] = done;
    total_[rank] = total;
    const uint64_t known = std::accumulate(total_.begin(), total_.end(), uint64_t{0});
    options_.progress(options_.progress_context, std::accumulate(done_.begin(), done_.end(), uint64_t{0}),
                      told_ == 0 ? known : known * total_.size() / told_);
  }

 private:
  const glm_engine_options& options_;
  std::mutex mutex_;
  std::vector<uint64_t> done_;   // guarded by mutex_, as all below
  std::vector<uint64_t> total_;  // 0: not told yet
  size_t told_ = 0;
};

}  // namespace glm
