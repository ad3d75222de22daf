#include "engine/engine.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "weights/random_kv.h"
#include "weights/scan.h"

namespace glm {
namespace {

Limits read_limits(const glm_engine_options& options) {
  const auto check = [](const char* name, int32_t value) {
    if (value < 1) fail(GLM_INVALID_ARGUMENT, name, " ", value, ", expected at least 1");
  };
  check("max_rows", options.max_rows);
  check("max_samples", options.max_samples);
  check("max_slots", options.max_slots);
  check("max_context", options.max_context);
  check("num_pages", options.num_pages);
  if (options.max_context % GLM_PAGE_SIZE != 0) {
    fail(GLM_INVALID_ARGUMENT, "max_context ", options.max_context, ", expected a multiple of ", GLM_PAGE_SIZE);
  }
  return {options.max_rows,    options.max_samples, options.max_slots,
          options.max_context, options.num_pages,   /*spare=*/0};
}

void check_pointers(const glm_engine_options& options) {
  const auto check = [](const char* name, const void* pointer) {
    if (pointer == nullptr) fail(GLM_INVALID_ARGUMENT, name, " is NULL");
  };
  check("kernels_path", options.kernels_path);
  for (int32_t rank = 0; rank < options.num_ranks; ++rank) {
    check("mixed_plan", options.ranks[rank].mixed_plan);
    check("decode_plan", options.ranks[rank].decode_plan);
  }
  if (options.num_threads < 0) {
    fail(GLM_INVALID_ARGUMENT, "num_threads ", options.num_threads, ", expected at least 0");
  }
}

int32_t all_threads(const glm_engine_options& options) {
  cpu_set_t cores;
  if (options.num_threads > 0) return options.num_threads;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? std::max(1, CPU_COUNT(&cores)) : 1;
}

// The ranks compute at the same time.
int32_t threads_of_a_rank(const glm_engine_options& options) {
  return std::max(1, all_threads(options) / options.num_ranks);
}

// What is left to the device's driver where KV pages take the rest of its memory: graphs, and the ends of allocations.
constexpr size_t kDriverBytes = size_t{768} << 20;

glm_sampling greedy() {
  glm_sampling sampling{};
  sampling.top_p = 1;
  sampling.repetition_penalty = 1;
  sampling.num_logprobs = -1;
  return sampling;
}

void check_one_sample(const Plan& plan) {
  int32_t count = 0;
  for (const OpSpec& op : plan.ops) count += op.kind == GLM_OP_SAMPLE;
  if (count != 1) fail(GLM_INVALID_ARGUMENT, plan.name, " plan: ", count, " sample ops, expected 1");
}

}  // namespace

Engine::Engine(const glm_engine_options& options, int32_t rank, OnFailure on_failure)
    : on_failure_(std::move(on_failure)), place_{rank, options.num_ranks}, limits_(read_limits(options)) {
  check_pointers(options);
  mixed_ = parse_plan(options.ranks[rank].mixed_plan, "mixed");
  decode_ = parse_plan(options.ranks[rank].decode_plan, "decode");
  check_one_sample(mixed_);
  check_one_sample(decode_);
  declarations_ = join_declarations(mixed_, decode_);
  table_.emplace(options.kernels_path, std::vector<const Plan*>{&mixed_, &decode_});
  table_->open_device({.ordinal = options.ranks[rank].device_ordinal, .num_threads = threads_of_a_rank(options)});
  device_.emplace(table_->kernels(), table_->device());
  if (const char* path = options.ranks[rank].driver_path) driver_.emplace(path);
  limits_.spare = device_->has_graphs() ? 1 : 0;
  weight_arena_.emplace(*device_, Arena::Kind::kDevice);
  kv_arena_.emplace(*device_, Arena::Kind::kDevice);
  scratch_arena_.emplace(*device_, Arena::Kind::kDevice);
  host_arena_.emplace(*device_, Arena::Kind::kHost);
}

void Engine::load(const glm_engine_options& options, TensorTable& tensors, const ScanProgress& progress) {
  resources_.act = declarations_.act;
  resources_.limits = limits_;
  Filler filler(*weight_arena_);
  resources_.weights = load_weights(declarations_, tensors, *weight_arena_, filler);
  resources_.state = make_state(declarations_, limits_, *scratch_arena_, filler);
  resources_.state.expert_loads = ExpertLoads(mixed_, decode_, *scratch_arena_);
  scan_weights(resources_.weights.regions, *device_, threads_of_a_rank(options), progress);
  filler.finish();
  allocate_steps();
  bind_plans();  // to learn the workspace; the KV pages take what is left
  allocate_workspace();
}

void Engine::allocate_workspace() {
  size_t workspace = 0;
  for (const Executor& executor : executors_) workspace = std::max(workspace, executor.workspace_bytes());
  table_->kernels().set_workspace(table_->device(), scratch_arena_->allocate_bytes("workspace of ops", workspace),
                                  workspace);
}

void Engine::allocate_steps() {
  device_block_ = make_step_block(limits_, declarations_.vocab, *scratch_arena_);
  // Ops write of the results what was asked for, and all of them are copied out.
  device_->fill(device_block_.results, 0, device_block_.result_bytes);
  resources_.state.step = device_block_.step;
  for (size_t i = 0; i < GLM_MAX_IN_FLIGHT + 1; ++i) {
    staging_.emplace_back(*device_, limits_, declarations_.vocab, *host_arena_);
  }
  slot_binder_.emplace(*device_, resources_.state.slots, *host_arena_);
}

int32_t Engine::fitting_pages(bool fit) const {
  if (!declarations_.kv || !fit || device_->host_memory()) return limits_.num_pages;
  const size_t page_bytes = kv_page_bytes(*declarations_.kv);
  device_->require_free("KV pages, at least one, and the driver",
                        static_cast<size_t>(1 + limits_.spare) * page_bytes + kDriverBytes);
  const size_t fitting = (device_->free_bytes() - kDriverBytes) / page_bytes - static_cast<size_t>(limits_.spare);
  return static_cast<int32_t>(std::min(static_cast<size_t>(limits_.num_pages), fitting));
}

void Engine::take_pages(const glm_engine_options& options, int32_t num_pages) {
  limits_.num_pages = num_pages;
  resources_.limits = limits_;
  if (const auto& kv = declarations_.kv) {
    device_->require_free("KV pages", Arena::byte_count("KV pages", kv_page_bytes(*kv), {limits_.all_pages()}));
    allocate_kv(resources_.state.kv, limits_, *kv_arena_);
  }
  if (options.random_kv != 0) {
    scan_weights(random_kv_regions(resources_.state.kv, limits_), *device_, all_threads(options), {});
  }
  bind_plans();
  if (driver_) {
    executors_[GLM_PLAN_MIXED].attach(*driver_, "mixed", limits_);
    executors_[GLM_PLAN_DECODE].attach(*driver_, "decode", limits_);
  }
  mirror_.emplace(limits_, declarations_.vocab);
}

void Engine::start() {
  thread_ = std::thread([this] { run(); });
}

void Engine::wait_ready() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ready_ || failed_; });
  if (failed_) throw *failed_;
}

void Engine::bind_plans() {
  executors_.clear();
  for (const Plan* plan : {&mixed_, &decode_})
    executors_.emplace_back(*device_, bind_plan(*plan, resources_), mark_, place_, table_->range_calls());
}

void Engine::record_decode() {
  if (!device_->has_graphs()) return;
  slot_binder_->apply({.slot = limits_.max_slots, .sampling = greedy(), .prompt = {}, .sampled = {}});
  Staging& padding = staging_.front();
  pad_decode(0, limits_.max_decode_rows(), limits_, padding.block.step);
  padding.block.page_updates[0] = {.slot = limits_.max_slots, .index = 0, .page = limits_.num_pages};
  padding.num_page_updates = 1;
  send_inputs(padding);
  Executor& decode = executors_[GLM_PLAN_DECODE];
  graphs_.emplace(*device_, decode, resources_.state.step, limits_.max_decode_rows());
  exchange_log_.skip(graphs_->size() * decode.num_exchanges(true));
}

Engine::~Engine() {
  stop();
}

void Engine::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  table_->kernels().synchronize(table_->device());  // steps in flight still use what is about to be freed
}

void Engine::throw_if_failed() const {
  const std::lock_guard lock(mutex_);
  if (failed_) throw *failed_;
}

glm_engine_info Engine::info() const {
  throw_if_failed();
  glm_engine_info info{};
  std::strncpy(info.kernels, table_->kernels().name, sizeof(info.kernels) - 1);
  std::strncpy(info.device, table_->kernels().device_description(table_->device()), sizeof(info.device) - 1);
  info.weight_bytes_mapped = resources_.weights.bytes_mapped();
  info.weight_bytes_copied = weight_arena_->bytes();
  info.kv_bytes = kv_arena_->bytes();
  info.scratch_bytes = scratch_arena_->bytes() + host_arena_->bytes();
  info.num_pages = limits_.num_pages;
  info.max_slots = limits_.max_slots;
  info.max_context = limits_.max_context;
  info.vocab = resources_.state.slots.vocab;
  info.steps_run = finished_;
  return info;
}

void Engine::bind_slot(int32_t slot, const glm_sampling& sampling, const int32_t* prompt, int32_t num_prompt,
                       const int32_t* sampled, int32_t num_sampled) {
  throw_if_failed();
  mirror_->check_binding(slot, sampling, prompt, num_prompt, sampled, num_sampled);
  auto binding = std::make_unique<SlotBinding>(SlotBinding{.slot = slot,
                                                           .sampling = sampling,
                                                           .prompt = {prompt, prompt + num_prompt},
                                                           .sampled = {sampled, sampled + num_sampled}});
  push({std::move(binding), nullptr});
  mirror_->bind(slot);
}

// Nothing on the device changes: steps in flight still read the slot, and the next owner's binding comes after them.
void Engine::release_slot(int32_t slot) {
  throw_if_failed();
  mirror_->check_slot("slot", slot);
  mirror_->release(slot);
}

void Engine::submit(const glm_step_batch& batch) {
  throw_if_failed();
  if (submitted_ - collected_ >= GLM_MAX_IN_FLIGHT) {
    fail(GLM_INVALID_ARGUMENT, submitted_ - collected_, " steps are in flight, expected a collect before the next");
  }
  mirror_->accept(batch);
  Staging& staging = staging_[submitted_ % staging_.size()];
  const bool replayed = graphs_ && batch.plan == GLM_PLAN_DECODE && batch.num_rows > 0;
  fill_staging(batch, *mirror_, replayed ? graphs_->bucket(batch.num_rows) : batch.num_rows, limits_, staging);
  if (batch.num_masks > 0) held_.push_back(&staging);
  push({nullptr, &staging});
  ++submitted_;
}

glm_step_result Engine::collect() {
  if (collected_ == submitted_) {
    throw_if_failed();
    fail(GLM_INVALID_ARGUMENT, "no step is in flight, expected a submit before collect");
  }
  if (!held_.empty() && held_.front() == &staging_[collected_ % staging_.size()]) {
    throw_if_failed();
    fail(GLM_INVALID_ARGUMENT, "the oldest step in flight is held, expected glm_engine_set_masks before collect");
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ > collected_ || given_up_; });
    if (failed_ && (lost_ || given_up_ || collected_ >= finished_)) throw *failed_;
  }
  const Staging& staging = staging_[collected_ % staging_.size()];
  uint64_t device_ns = 0;
  try {
    staging.finished.wait();
    device_ns = staging.started.nanoseconds_until(staging.finished);
  } catch (const Failure& failure) {
    lost_ = true;
    note_failure(failure, collected_);
    throw_if_failed();
  }
  ++collected_;
  return staging.result(device_ns);
}

void Engine::note_failure(const Failure& failure, uint64_t step) {
  set_failed(Failure(failure.status(), text(failure.what(), " in step ", step)));
}

// The other ranks are told first: whoever finds this rank failed also finds out what was the first failure of all.
void Engine::set_failed(const Failure& failure) {
  on_failure_(failure);
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) failed_.emplace(failure);
  }
  changed_.notify_all();
}

void Engine::give_up(const Failure& failure) {
  {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
  }
  set_failed(failure);
  changed_.notify_all();
}

void Engine::push(Command command) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(command));
  }
  changed_.notify_all();
}

// The engine's thread. What is queued when the engine is destroyed still runs.
void Engine::run() {
  try {
    record_decode();
    {
      const std::lock_guard lock(mutex_);
      ready_ = true;
    }
    changed_.notify_all();
  } catch (const Failure& failure) {
    set_failed(failure);
  }
  while (true) {
    Command command;
    bool failed = false;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      command = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      failed = failed_.has_value();
    }
    if (!failed) run_command(command);
    {
      const std::lock_guard lock(mutex_);
      busy_ = false;
      if (!command.binding) ++ended_;
    }
    changed_.notify_all();
  }
}

void Engine::run_command(const Command& command) {
  const std::lock_guard lock(stream_mutex_);
  try {
    if (command.binding) {
      slot_binder_->apply(*command.binding);
    } else {
      run_step(*command.step);
      mark_.op = nullptr;
      ++finished_;
    }
  } catch (const Failure& failure) {
    note_failure(failure, finished_);
  }
}

void Engine::run_step(Staging& step) {
  send_inputs(step);
  step.started.record();
  run_forward(step);
  if (step.num_masks > 0) {
    if (!wait_for_masks()) return;
    device_->copy_in(device_block_.step.masks, step.block.step.masks, step.block.mask_bytes(step.num_masks));
  }
  executors_[static_cast<size_t>(step.plan)].run_sample(step.block.step.num_rows, step.num_samples);
  device_->copy_out(step.block.results, device_block_.results, step.block.result_bytes);
  step.finished.record();
}

void Engine::send_inputs(const Staging& step) {
  device_->copy_in(device_block_.inputs, step.block.inputs, step.block.input_bytes(step.num_page_updates));
  device_->update_pages(resources_.state.slots, device_block_.page_updates, step.num_page_updates);
}

void Engine::run_forward(const Staging& step) {
  const glm_step_inputs& from = step.block.step;
  exchange_log_.add(finished_, executors_[static_cast<size_t>(step.plan)], from.num_rows, from.num_samples);
  set_counts(from);
  if (graphs_ && step.plan == GLM_PLAN_DECODE && from.num_rows > 0) {
    graphs_->launch(from.num_rows);
    return;
  }
  executors_[static_cast<size_t>(step.plan)].run_forward(from.num_rows, from.num_samples);
}

void Engine::set_counts(const glm_step_inputs& from) {
  glm_step_inputs& to = resources_.state.step;
  to.num_rows = from.num_rows;
  to.num_seqs = from.num_seqs;
  to.num_samples = from.num_samples;
}

}  // namespace glm
