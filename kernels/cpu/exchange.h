/* What the ranks of a device's group tell each other within one operation. Without a group there is this rank alone. */
#ifndef GLM_CPU_EXCHANGE_H
#define GLM_CPU_EXCHANGE_H

#include <algorithm>

#include "device.h"
#include "group.h"
#include "isa.h"

GLM_CPU_BEGIN

/* The ranks make the same calls in the same order. */
class Exchange {
 public:
  explicit Exchange(const glm_device* device) : group_(device->group), rank_(device->rank) {}

  bool alone() const { return group_ == nullptr; }
  int rank() const { return rank_; }
  int num_ranks() const { return alone() ? 1 : group_->meeting.num_ranks(); }

  /* all[rank] = the `mine` of every rank; until `release` nobody changes what it points to, but for parts that are
   * agreed to be another's. False after an abort, and then nothing is there. */
  template <typename T>
  bool gather(const T* mine, const T** all) {
    group_->meeting.publish(rank_, mine);
    aborted_ = aborted_ || !group_->meeting.arrive();
    if (aborted_) return false;
    for (int rank = 0; rank < num_ranks(); ++rank) all[rank] = static_cast<const T*>(group_->meeting.published(rank));
    return true;
  }
  void release() { aborted_ = aborted_ || !group_->meeting.arrive(); }

  /* visit(data) for the `mine` of every rank, in order of rank. After an abort only this rank's own is visited: the
   * operation ends, with numbers that nobody is to use. */
  template <typename T, typename Visit>
  void each(const T* mine, Visit visit) {
    const T* all[GLM_MAX_RANKS];
    if (alone() || !gather(mine, all)) return visit(mine);
    for (int rank = 0; rank < num_ranks(); ++rank) visit(all[rank]);
    release();
  }

  /* values[i] = the sum over all ranks, ascending: the same bits everywhere. */
  void sum(double* values, int n) {
    constexpr int kMost = 1 << 11;
    double sums[kMost];
    if (alone()) return;
    std::fill_n(sums, n, 0.0);
    each(values, [&](const double* theirs) {
      for (int i = 0; i < n; ++i) sums[i] += theirs[i];
    });
    std::copy_n(sums, n, values);
  }

  /* Of the operation. */
  glm_status status() const { return aborted_ ? GLM_DEVICE_ERROR : GLM_OK; }

 private:
  glm_group* group_;
  int rank_;
  bool aborted_ = false;
};

GLM_CPU_END

#endif
