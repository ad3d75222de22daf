/* How attention is cut into tasks. A unit is a run of query rows of one sequence for one KV head. Its keys come in
 * splits of fixed size at fixed positions, merged in order; so whether a unit's splits are one task or many changes no
 * bit of the result. */
#ifndef GLM_CPU_ATTENTION_PLAN_H
#define GLM_CPU_ATTENTION_PLAN_H

#include <algorithm>

#include "workspace.h"

GLM_CPU_BEGIN

inline constexpr int32_t kSplitPages = 32; /* 512 keys */
inline constexpr int32_t kSplitKeys = kSplitPages * GLM_PAGE_SIZE;
/* Queries of a unit: enough to pay for converting its pages to f32, few enough to stay in the first-level cache. */
inline constexpr int32_t kUnitQueries = 48;
/* A unit with more than this part of a thread's share of the work is cut into its splits. */
inline constexpr int64_t kUnitsPerThread = 8;

struct AttentionUnit {
  int32_t first_row;
  int32_t rows;
  int32_t slot;
  int32_t kv_head;
  int32_t splits;  /* of the last row, the longest */
  int64_t partial; /* first of `splits` x queries partial results, or -1: one task for the whole unit */
};

struct AttentionTask {
  int32_t unit;
  int32_t split; /* -1: all of them, in order */
};

struct AttentionPlan {
  AttentionUnit* units;
  AttentionTask* tasks;
  int32_t num_units = 0;
  int32_t num_tasks = 0;
};

/* What bounds the plan of any step: sizes of its arrays. */
struct AttentionLimits {
  AttentionLimits(const glm_paged_attention_args& args, int num_threads) {
    const int32_t max_splits = (args.slots->max_pages + kSplitPages - 1) / kSplitPages;
    /* Enough to cut the units of two decoding rows, or of as many as give every thread two units. */
    const int64_t cut_rows = std::max<int64_t>(2, (2 * num_threads + args.kv.kv_heads - 1) / args.kv.kv_heads);
    units = int64_t{args.rows} * args.kv.kv_heads;
    partials = cut_rows * args.heads * max_splits;
    tasks = units + partials;
  }
  int64_t units;
  int64_t tasks;
  int64_t partials;
};

inline int32_t rows_per_unit(const glm_paged_attention_args& args) {
  return std::max(1, kUnitQueries / (args.heads / args.kv.kv_heads));
}

/* Fills the plan's units: a sequence's last rows come first, because they have the most keys. Returns the sum of their
 * splits. */
inline int64_t plan_units(const glm_paged_attention_args& args, AttentionPlan* plan) {
  const glm_step_inputs& step = *args.step;
  const int32_t unit_rows = rows_per_unit(args);
  int64_t total = 0;
  for (int32_t seq = 0; seq < step.num_seqs; ++seq) {
    const int32_t begin = step.seq_starts[seq];
    for (int32_t end = step.seq_starts[seq + 1]; end > begin; end -= unit_rows) {
      const int32_t first = std::max(begin, end - unit_rows);
      const int32_t splits = step.positions[end - 1] / kSplitKeys + 1;
      for (int32_t head = 0; head < args.kv.kv_heads; ++head) {
        plan->units[plan->num_units++] = {first, end - first, step.seq_slots[seq], head, splits, -1};
      }
      total += int64_t{splits} * args.kv.kv_heads;
    }
  }
  return total;
}

/* Whole units first, then the splits of those that are cut: small tasks at the end even out the threads. */
inline void plan_tasks(const glm_paged_attention_args& args, int num_threads, int64_t max_partials,
                       AttentionPlan* plan) {
  const int64_t total = plan_units(args, plan);
  const int64_t group = args.heads / args.kv.kv_heads;
  int64_t partials = 0;
  for (int32_t i = 0; i < plan->num_units; ++i) {
    AttentionUnit& unit = plan->units[i];
    const int64_t needed = unit.splits * unit.rows * group;
    const bool large = unit.splits * kUnitsPerThread * num_threads > total;
    if (unit.splits > 1 && large && partials + needed <= max_partials) {
      unit.partial = partials;
      partials += needed;
    } else {
      plan->tasks[plan->num_tasks++] = {i, -1};
    }
  }
  for (int32_t i = 0; i < plan->num_units; ++i) {
    if (plan->units[i].partial < 0) continue;
    for (int32_t split = 0; split < plan->units[i].splits; ++split) plan->tasks[plan->num_tasks++] = {i, split};
  }
}

GLM_CPU_END

#endif
