#ifndef GLM_CPU_EXPERT_TASKS_H
#define GLM_CPU_EXPERT_TASKS_H

#include <algorithm>

#include "matmul.h"
#include "workspace.h"

GLM_CPU_BEGIN

/* Rows [row_begin, row_begin + rows) of one expert's weights, for assignments order[begin .. end). */
struct ExpertTask {
  int32_t expert; /* local */
  int32_t row_begin;
  int32_t rows;
  int32_t begin;
  int32_t end;
};

/* Cuts the touched experts into row blocks; untouched ones have no task, so their weights are never read. */
class ExpertTasks {
 public:
  ExpertTasks(WorkspaceLayout& layout, int32_t num_experts)
      : experts_(layout.take<int32_t>(num_experts)),
        first_tasks_(layout.take<int32_t>(num_experts)),
        row_blocks_(layout.take<int32_t>(num_experts)) {}

  void plan(const glm_expert_weights& weights, const int32_t* offsets, int num_threads) {
    offsets_ = offsets;
    rows_ = weights.rows;
    int32_t touched = 0;
    for (int32_t e = 0; e < weights.count; ++e) touched += offsets[e + 1] > offsets[e];
    for (int32_t e = 0; e < weights.count; ++e) {
      const int32_t assignments = offsets[e + 1] - offsets[e];
      if (assignments == 0) continue;
      const int32_t block = matmul_row_block(weights.format, rows_, weights.cols, touched, assignments, num_threads);
      experts_[touched_] = e;
      first_tasks_[touched_] = num_tasks_;
      row_blocks_[touched_] = block;
      num_tasks_ += (rows_ + block - 1) / block;
      ++touched_;
    }
  }

  int32_t num_tasks() const { return num_tasks_; }

  /* The task that the thread at `task` will probably run next. */
  ExpertTask after(int64_t task) const { return (*this)[std::min<int64_t>(task + 1, num_tasks_ - 1)]; }

  ExpertTask operator[](int64_t task) const {
    const auto i =
        std::upper_bound(first_tasks_, first_tasks_ + touched_, task, [](int64_t a, int32_t b) { return a < b; }) -
        first_tasks_ - 1;
    const int32_t e = experts_[i];
    const int32_t row_begin = (static_cast<int32_t>(task) - first_tasks_[i]) * row_blocks_[i];
    return {e, row_begin, std::min(row_blocks_[i], rows_ - row_begin), offsets_[e], offsets_[e + 1]};
  }

 private:
  int32_t* experts_;
  int32_t* first_tasks_;
  int32_t* row_blocks_;
  const int32_t* offsets_ = nullptr;
  int32_t rows_ = 0;
  int32_t touched_ = 0;
  int32_t num_tasks_ = 0;
};

GLM_CPU_END

#endif
