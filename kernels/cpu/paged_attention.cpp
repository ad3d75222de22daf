/* Attention over pages (Dao 2022; Kwon et al. 2023): each page is converted to f32 once for all queries of a unit. */
#include <limits>

#include "attention_plan.h"
#include "attention_tile.h"
#include "device.h"
#include "kv_page.h"
#include "ops.h"

GLM_CPU_BEGIN

namespace {

/* Softmax state and values of a block of queries; values are [queries][pitch]. */
struct Partial {
  SoftmaxState* states;
  float* values;
  Partial at(int64_t query, int pitch) const { return {states + query, values + query * pitch}; }
};

struct ThreadBlocks {
  float* queries; /* [kUnitQueries][pitch] */
  float* keys;    /* [page][pitch] */
  float* values;
  Partial total; /* of the splits so far */
  Partial split; /* of the split at hand */
};

class Workspace {
 public:
  Workspace(const glm_device* device, std::byte* base, const glm_paged_attention_args& args)
      : limits(args, device->pool.num_threads()),
        pitch((args.kv.head_dim + kLanes - 1) / kLanes * kLanes),
        layout_(base),
        unit_queries_(rows_per_unit(args) * (args.heads / args.kv.kv_heads)) {
    plan.units = layout_.take<AttentionUnit>(static_cast<size_t>(limits.units));
    plan.tasks = layout_.take<AttentionTask>(static_cast<size_t>(limits.tasks));
    partials = take_partial(limits.partials);
    const int num_threads = device->pool.num_threads();
    threads_ = layout_.take<ThreadBlocks>(static_cast<size_t>(num_threads));
    for (int i = 0; i < num_threads; ++i) {
      const ThreadBlocks blocks = take_blocks();
      if (base != nullptr) threads_[i] = blocks;
    }
  }

  const ThreadBlocks& thread(int i) const { return threads_[i]; }
  size_t bytes() const { return layout_.bytes(); }

  AttentionLimits limits;
  int pitch;
  AttentionPlan plan;
  Partial partials;

 private:
  float* take_floats(int64_t rows) { return layout_.take<float>(static_cast<size_t>(rows) * pitch); }
  Partial take_partial(int64_t queries) {
    auto* states = layout_.take<SoftmaxState>(static_cast<size_t>(queries));
    return {states, take_floats(queries)};
  }
  ThreadBlocks take_blocks() {
    ThreadBlocks blocks;
    blocks.queries = take_floats(unit_queries_);
    blocks.keys = take_floats(GLM_PAGE_SIZE);
    blocks.values = take_floats(GLM_PAGE_SIZE);
    blocks.total = take_partial(unit_queries_);
    blocks.split = take_partial(unit_queries_);
    return blocks;
  }

  WorkspaceLayout layout_;
  int64_t unit_queries_;
  ThreadBlocks* threads_;
};

/* One unit on one thread. Query i of the unit is head i % group of row i / group. */
class UnitRunner {
 public:
  UnitRunner(const glm_paged_attention_args& args, const AttentionUnit& unit, const ThreadBlocks& blocks, int pitch)
      : args_(args), unit_(unit), blocks_(blocks), pitch_(pitch), group_(args.heads / args.kv.kv_heads) {}

  int queries() const { return unit_.rows * group_; }

  void load_queries() const {
    for (int i = 0; i < queries(); ++i) {
      float* to = blocks_.queries + i * pitch_;
      load_floats(query_address(args_.q, i), args_.q.dtype, to, args_.kv.head_dim);
      for (int j = 0; j < args_.kv.head_dim; ++j) to[j] *= args_.softmax_scale;
      for (int j = args_.kv.head_dim; j < pitch_; ++j) to[j] = 0.0f;
    }
  }

  /* The keys of one split, for every query that reaches it. */
  void run_split(int32_t split, const Partial& into) const {
    for (int i = 0; i < queries(); ++i) into.states[i] = {-std::numeric_limits<float>::infinity(), 0.0f};
    for (int i = 0; i < queries() * pitch_; ++i) into.values[i] = 0.0f;
    const int32_t last_page = position(unit_.rows - 1) / GLM_PAGE_SIZE;
    const int32_t end = std::min((split + 1) * kSplitPages, last_page + 1);
    for (int32_t page = split * kSplitPages; page < end; ++page) {
      const int32_t next = std::min(page + 1, end - 1);
      if (as_stored()) {
        run_page(page, stored_page(args_.kv.k, page, next), stored_page(args_.kv.v, page, next), into);
        continue;
      }
      load_page(page_address(args_.kv.k, page), page_address(args_.kv.k, next), blocks_.keys);
      load_page(page_address(args_.kv.v, page), page_address(args_.kv.v, next), blocks_.values);
      run_page(page, ScratchPage{blocks_.keys}, ScratchPage{blocks_.values}, into);
    }
  }

  void merge_split(int32_t split, const Partial& part, const Partial& into) const {
    for (int i = 0; i < queries(); ++i) {
      if (position(i / group_) < split * kSplitKeys) continue;
      const Partial to = into.at(i, pitch_);
      merge_softmax(part.states[i], part.values + i * pitch_, pitch_, to.states, to.values);
    }
  }

  /* Divides by the weights' sum. Adding 0 makes -0 one with 0: masked keys of a wider batch may have met either. */
  void store_result(const Partial& result) const {
    for (int i = 0; i < queries(); ++i) {
      float* values = result.values + i * pitch_;
      const float scale = 1.0f / result.states[i].total;
      for (int j = 0; j < args_.kv.head_dim; ++j) values[j] = values[j] * scale + 0.0f;
      store_act(values, args_.out.dtype, query_address(args_.out, i), args_.kv.head_dim);
    }
  }

 private:
  int32_t position(int row) const { return args_.step->positions[unit_.first_row + row]; }

  void* query_address(const glm_tensor& tensor, int query) const {
    const int64_t head = unit_.kv_head * group_ + query % group_;
    auto* row = static_cast<std::byte*>(row_of(tensor, unit_.first_row + query / group_));
    return row + head * args_.kv.head_dim * static_cast<int64_t>(dtype_bytes(tensor.dtype));
  }

  const std::byte* page_address(const void* pages, int32_t page_index) const {
    const int32_t page = page_of(*args_.slots, unit_.slot, page_index);
    return static_cast<const std::byte*>(pages) + kv_page_offset(args_.kv, page, unit_.kv_head);
  }

  bool as_stored() const {
    return queries() <= kQueryBlock && args_.kv.dtype == GLM_BF16 && args_.kv.head_dim == pitch_;
  }

  StoredPage stored_page(const void* pages, int32_t page, int32_t next) const {
    return {reinterpret_cast<const uint16_t*>(page_address(pages, page)), page_address(pages, next)};
  }

  /* Pages are scattered, so the hardware does not foresee `next`: it is fetched while this one is converted. */
  void load_page(const std::byte* from, const std::byte* next, float* to) const {
    const glm_kv_layer& kv = args_.kv;
    const int64_t token_bytes = kv.head_dim * static_cast<int64_t>(dtype_bytes(kv.dtype));
    for (int token = 0; token < GLM_PAGE_SIZE; ++token) {
      const int64_t offset = token * token_bytes;
      for (int64_t line = 0; line < token_bytes; line += 64) __builtin_prefetch(next + offset + line);
      load_kv(from + offset, kv.dtype, to + token * pitch_, kv.head_dim);
      for (int j = kv.head_dim; j < pitch_; ++j) to[token * pitch_ + j] = 0.0f;
    }
  }

  int count(int query, int32_t page) const {
    return std::clamp(position(query / group_) + 1 - page * GLM_PAGE_SIZE, 0, GLM_PAGE_SIZE);
  }

  /* Blocks of queries that see the same number of the page's keys, so that no key past a query's own is ever touched
   * for it. */
  template <typename Page>
  void run_page(int32_t page, const Page& keys, const Page& values, const Partial& into) const {
    int query = 0;
    while (query < queries()) {
      const int seen = count(query, page);
      int width = 1;
      while (width < kQueryBlock && query + width < queries() && count(query + width, page) == seen) ++width;
      if (seen > 0) run_block(query, width, keys, values, seen, into.at(query, pitch_));
      query += width;
    }
  }

  template <typename Page>
  void run_block(int query, int width, const Page& keys, const Page& values, int seen, const Partial& into) const {
    static_assert(kQueryBlock == 3);
    const float* queries = blocks_.queries + query * pitch_;
    if (width == 3) return attend_page<3>(queries, keys, values, seen, pitch_, into.states, into.values);
    if (width == 2) return attend_page<2>(queries, keys, values, seen, pitch_, into.states, into.values);
    attend_page<1>(queries, keys, values, seen, pitch_, into.states, into.values);
  }

  const glm_paged_attention_args& args_;
  const AttentionUnit& unit_;
  const ThreadBlocks& blocks_;
  int pitch_;
  int group_;
};

void run_task(const glm_paged_attention_args& args, const Workspace& work, const AttentionTask& task, int thread) {
  const AttentionUnit& unit = work.plan.units[task.unit];
  const ThreadBlocks& blocks = work.thread(thread);
  const UnitRunner runner(args, unit, blocks, work.pitch);
  runner.load_queries();
  if (task.split >= 0) {
    runner.run_split(task.split, work.partials.at(unit.partial + int64_t{task.split} * runner.queries(), work.pitch));
    return;
  }
  runner.run_split(0, blocks.total);
  for (int32_t split = 1; split < unit.splits; ++split) {
    runner.run_split(split, blocks.split);
    runner.merge_split(split, blocks.split, blocks.total);
  }
  runner.store_result(blocks.total);
}

void merge_unit(const glm_paged_attention_args& args, const Workspace& work, const AttentionUnit& unit, int thread) {
  if (unit.partial < 0) return;
  const UnitRunner runner(args, unit, work.thread(thread), work.pitch);
  const Partial total = work.partials.at(unit.partial, work.pitch);
  for (int32_t split = 1; split < unit.splits; ++split) {
    runner.merge_split(split, total.at(int64_t{split} * runner.queries(), work.pitch), total);
  }
  runner.store_result(total);
}

}  // namespace

size_t paged_attention_workspace(const glm_device* device, const glm_paged_attention_args* args) {
  return Workspace(device, nullptr, *args).bytes();
}

glm_status paged_attention(glm_device* device, const glm_paged_attention_args* args) {
  Workspace work(device, device->workspace, *args);
  plan_tasks(*args, device->pool.num_threads(), work.limits.partials, &work.plan);
  parallel_for(device->pool, work.plan.num_tasks, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) run_task(*args, work, work.plan.tasks[i], thread);
  });
  const bool cut = work.plan.num_tasks > 0 && work.plan.tasks[work.plan.num_tasks - 1].split >= 0;
  if (!cut) return GLM_OK;
  parallel_for(device->pool, work.plan.num_units, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) merge_unit(*args, work, work.plan.units[i], thread);
  });
  return GLM_OK;
}

GLM_CPU_END
