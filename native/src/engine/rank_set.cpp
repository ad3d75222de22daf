#include "engine/rank_set.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "engine/load_progress.h"

namespace glm {
namespace {

std::span<const glm_tensor_source> tensors_of(const glm_engine_options& options) {
  if (options.num_tensors < 0) {
    fail(GLM_INVALID_ARGUMENT, "num_tensors ", options.num_tensors, ", expected at least 0");
  }
  if (options.num_tensors > 0 && options.tensors == nullptr) fail(GLM_INVALID_ARGUMENT, "tensors is NULL");
  return {options.tensors, static_cast<size_t>(options.num_tensors)};
}

int32_t num_ranks_of(const glm_engine_options& options) {
  if (options.num_ranks < 1 || options.num_ranks > GLM_MAX_RANKS) {
    fail(GLM_INVALID_ARGUMENT, "num_ranks ", options.num_ranks, ", expected 1 to ", GLM_MAX_RANKS);
  }
  if (options.ranks == nullptr) fail(GLM_INVALID_ARGUMENT, "ranks is NULL");
  return options.num_ranks;
}

bool ends_the_engine(const Failure& failure) {
  return failure.status() == GLM_DEVICE_ERROR || failure.status() == GLM_INTERNAL;
}

}  // namespace

RankSet::RankSet(const glm_engine_options& options) : tensors_(tensors_of(options)) {
  const int32_t num_ranks = num_ranks_of(options);
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    engines_.push_back(std::make_unique<Engine>(
        options, rank, [this, rank](const Failure& failure) { note_failure(static_cast<size_t>(rank), failure); }));
  }
  check_plans();
  if (num_ranks > 1) create_group();
  try {
    load(options);
  } catch (...) {
    group_.abort();
    stop();
    throw;
  }
}

void RankSet::check_plans() const {
  for (const glm_plan_kind kind : {GLM_PLAN_MIXED, GLM_PLAN_DECODE}) {
    std::vector<const Plan*> plans;
    for (const auto& engine : engines_) plans.push_back(&engine->plan(kind));
    check_ranks(plans);
  }
}

void RankSet::create_group() {
  std::vector<const Device*> devices;
  for (const auto& engine : engines_) devices.push_back(&engine->device());
  group_.create(devices);
}

template <class Call>
void RankSet::each(Call call) {
  try {
    for (const auto& engine : engines_) call(*engine);
  } catch (const Failure& failure) {
    if (ends_the_engine(failure)) throw_if_failed();
    throw;
  }
}

template <class Call>
void RankSet::at_once(Call call) {
  std::vector<std::exception_ptr> errors(engines_.size());
  std::vector<std::jthread> threads;
  for (size_t rank = 0; rank < engines_.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        call(*engines_[rank], rank);
      } catch (const Failure& failure) {
        errors[rank] = std::make_exception_ptr(of_rank(rank, failure));
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  threads.clear();  // joins them
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

void RankSet::load(const glm_engine_options& options) {
  LoadProgress progress(options, engines_.size());
  at_once([&](Engine& engine, size_t rank) {
    engine.load(options, tensors_, [&](uint64_t done, uint64_t total) { progress.tell(rank, done, total); });
  });
  int32_t num_pages = options.num_pages;
  for (const auto& engine : engines_) num_pages = std::min(num_pages, engine->fitting_pages(options.fit_pages != 0));
  for (const auto& engine : engines_) engine->take_pages(options, num_pages);
  for (const auto& engine : engines_) engine->start();
  each([](Engine& engine) { engine.wait_ready(); });
}

RankSet::~RankSet() {
  stop();
}

// All of them before any is destroyed: steps in flight exchange data, and the group goes before its devices.
void RankSet::stop() {
  for (const auto& engine : engines_) engine->stop();
}

Failure RankSet::of_rank(size_t rank, const Failure& failure) const {
  if (engines_.size() == 1) return failure;
  return Failure(failure.status(), text("rank ", rank, ": ", failure.what()));
}

// GPUs that share memory fail together: which of them began it, and in which op, only their progress tells.
Failure RankSet::with_places(const Failure& failure) const {
  const std::string where = group_.progress().empty() ? "" : progress().where;
  return where.empty() ? failure : Failure(failure.status(), text(failure.what(), " (", where, ")"));
}

void RankSet::note_failure(size_t rank, const Failure& failure) {
  const Failure told = with_places(of_rank(rank, failure));
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) failed_.emplace(told);
  }
  group_.abort();
}

void RankSet::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) failed_.emplace(GLM_DEVICE_ERROR, reason);
  }
  group_.abort();
  for (const auto& engine : engines_) engine->give_up(Failure(GLM_DEVICE_ERROR, reason));
}

void RankSet::throw_if_failed() const {
  const std::lock_guard lock(mutex_);
  if (failed_) throw *failed_;
}

glm_engine_info RankSet::info() const {
  throw_if_failed();
  glm_engine_info sum = engines_.front()->info();
  for (const auto& engine : std::span(engines_).subspan(1)) {
    const glm_engine_info info = engine->info();
    sum.weight_bytes_mapped += info.weight_bytes_mapped;
    sum.weight_bytes_copied += info.weight_bytes_copied;
    sum.kv_bytes += info.kv_bytes;
    sum.scratch_bytes += info.scratch_bytes;
    sum.steps_run = std::min(sum.steps_run, info.steps_run);
  }
  if (engines_.size() > 1) {
    const std::string device = text(engines_.size(), " ranks, each ", sum.device);
    std::strncpy(sum.device, device.c_str(), sizeof(sum.device) - 1);
  }
  return sum;
}

void RankSet::bind_slot(int32_t slot, const glm_sampling& sampling, const int32_t* prompt, int32_t num_prompt,
                        const int32_t* sampled, int32_t num_sampled) {
  throw_if_failed();
  each([&](Engine& engine) { engine.bind_slot(slot, sampling, prompt, num_prompt, sampled, num_sampled); });
}

void RankSet::release_slot(int32_t slot) {
  throw_if_failed();
  each([&](Engine& engine) { engine.release_slot(slot); });
}

void RankSet::submit(const glm_step_batch& batch) {
  throw_if_failed();
  each([&](Engine& engine) { engine.submit(batch); });
}

void RankSet::set_masks(const uint32_t* masks) {
  throw_if_failed();
  each([&](Engine& engine) { engine.set_masks(masks); });
}

glm_step_result RankSet::collect() {
  std::optional<glm_step_result> result;  // the first rank's: all have the same
  each([&](Engine& engine) {
    const glm_step_result found = engine.collect();
    if (!result) result = found;
    result->device_ns = std::max(result->device_ns, found.device_ns);
  });
  return *result;
}

glm_engine_progress RankSet::progress() const {
  glm_engine_progress progress{};
  std::string busy;
  std::string waiting;
  const auto tell = [&](bool waits, size_t rank, const std::string& where) {
    std::string& list = waits ? waiting : busy;
    list += text(list.empty() ? "" : ", ", engines_.size() > 1 ? text("rank ", rank, " ") : "", where);
  };
  const std::vector<uint64_t> begun = group_.progress();
  const uint64_t most = begun.empty() ? 0 : *std::ranges::max_element(begun);
  for (size_t rank = 0; rank < engines_.size(); ++rank) {
    const Engine& engine = *engines_[rank];
    progress.calls += engine.mark().calls.load();
    // An exchange waits for the others; so whoever is in another op, or behind, comes first.
    if (const BoundOp* op = engine.mark().op.load(); op != nullptr) {
      tell(is_exchange(*op), rank, text("in ", describe(*op), " of step ", engine.steps_handed_over()));
    } else if (!begun.empty()) {
      progress.calls += begun[rank];
      const bool waits = begun[rank] == most;
      if (const std::string place = engine.device_place(begun[rank], waits); !place.empty()) tell(waits, rank, place);
    }
  }
  const std::string where = busy + (busy.empty() || waiting.empty() ? "" : "; ") + waiting;
  std::strncpy(progress.where, where.c_str(), sizeof(progress.where) - 1);
  return progress;
}

Engine& RankSet::rank(int32_t rank) {
  throw_if_failed();
  if (rank < 0 || static_cast<size_t>(rank) >= engines_.size()) {
    fail(GLM_INVALID_ARGUMENT, "rank ", rank, ", expected 0 to ", engines_.size() - 1);
  }
  return *engines_[static_cast<size_t>(rank)];
}

glm_step_result RankSet::run_ops(const glm_step_batch& batch, std::span<const int32_t> ops, int32_t repeats) {
  if (engines_.size() > 1) {
    fail(GLM_UNSUPPORTED, "ops are run one by one on an engine of 1 rank, this one has ", engines_.size(),
         ": use a rank slice");
  }
  return rank(0).run_ops(batch, ops, repeats);
}

}  // namespace glm
