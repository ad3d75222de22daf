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
  check("mixed_plan", options.mixed_plan);
  check("decode_plan", options.decode_plan);
  if (options.num_tensors < 0) {
    fail(GLM_INVALID_ARGUMENT, "num_tensors ", options.num_tensors, ", expected at least 0");
  }
  if (options.num_tensors > 0) check("tensors", options.tensors);
  if (options.num_threads < 0) {
    fail(GLM_INVALID_ARGUMENT, "num_threads ", options.num_threads, ", expected at least 0");
  }
}

int32_t scan_threads(int32_t num_threads) {
  cpu_set_t cores;
  if (num_threads > 0) return num_threads;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? std::max(1, CPU_COUNT(&cores)) : 1;
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

Engine::Engine(const glm_engine_options& options) : limits_(read_limits(options)) {
  check_pointers(options);
  const Plan mixed = parse_plan(options.mixed_plan, "mixed");
  const Plan decode = parse_plan(options.decode_plan, "decode");
  check_one_sample(mixed);
  check_one_sample(decode);
  table_.emplace(options.kernels_path, std::vector<const Plan*>{&mixed, &decode});
  table_->open_device({.ordinal = options.device_ordinal, .num_threads = options.num_threads});
  device_.emplace(table_->kernels(), table_->device());
  limits_.spare = device_->has_graphs() ? 1 : 0;
  weight_arena_.emplace(*device_, Arena::Kind::kDevice);
  kv_arena_.emplace(*device_, Arena::Kind::kDevice);
  scratch_arena_.emplace(*device_, Arena::Kind::kDevice);
  host_arena_.emplace(*device_, Arena::Kind::kHost);

  const Declarations declarations = join_declarations(mixed, decode);
  load(options, declarations);
  allocate_steps();
  bind_plans(mixed, decode);  // to learn the workspace; the KV pages take what is left
  size_t workspace = 0;
  for (const Executor& executor : executors_) workspace = std::max(workspace, executor.workspace_bytes());
  table_->kernels().set_workspace(table_->device(), scratch_arena_->allocate_bytes("workspace of ops", workspace),
                                  workspace);
  if (declarations.kv) allocate_kv_pages(*declarations.kv, options.fit_pages != 0);
  if (options.random_kv != 0) {
    scan_weights(random_kv_regions(resources_.state.kv, limits_), *device_, scan_threads(options.num_threads), {});
  }
  bind_plans(mixed, decode);
  mirror_.emplace(limits_, declarations.vocab);
  record_decode();
  thread_ = std::thread([this] { run(); });
}

void Engine::load(const glm_engine_options& options, const Declarations& declarations) {
  resources_.act = declarations.act;
  resources_.limits = limits_;
  Filler filler(*weight_arena_);
  tensors_ = std::make_unique<TensorTable>(std::span(options.tensors, static_cast<size_t>(options.num_tensors)));
  resources_.weights = load_weights(declarations, *tensors_, *weight_arena_, filler);
  resources_.state = make_state(declarations, limits_, *scratch_arena_, filler);
  ScanProgress progress;
  if (options.progress != nullptr) {
    progress = [&options](uint64_t done, uint64_t total) { options.progress(options.progress_context, done, total); };
  }
  scan_weights(resources_.weights.regions, *device_, scan_threads(options.num_threads), progress);
  filler.finish();
}

void Engine::allocate_steps() {
  device_block_ = make_step_block(limits_, *scratch_arena_);
  // Ops write of the results what was asked for, and all of them are copied out.
  device_->fill(device_block_.results, 0, device_block_.result_bytes);
  resources_.state.step = device_block_.step;
  for (size_t i = 0; i < GLM_MAX_IN_FLIGHT + 1; ++i) staging_.emplace_back(*device_, limits_, *host_arena_);
  slot_binder_.emplace(*device_, resources_.state.slots, *host_arena_);
}

void Engine::allocate_kv_pages(const KvSpec& kv, bool fit) {
  const size_t page_bytes = kv_page_bytes(kv);
  if (fit && !device_->host_memory()) {
    device_->require_free("KV pages, at least one, and the driver",
                          static_cast<size_t>(1 + limits_.spare) * page_bytes + kDriverBytes);
    const size_t fitting = (device_->free_bytes() - kDriverBytes) / page_bytes - static_cast<size_t>(limits_.spare);
    limits_.num_pages = static_cast<int32_t>(std::min(static_cast<size_t>(limits_.num_pages), fitting));
    resources_.limits = limits_;
  }
  device_->require_free("KV pages", Arena::byte_count("KV pages", page_bytes, {limits_.all_pages()}));
  allocate_kv(resources_.state.kv, limits_, *kv_arena_);
}

void Engine::bind_plans(const Plan& mixed, const Plan& decode) {
  executors_.clear();
  for (const Plan* plan : {&mixed, &decode}) executors_.emplace_back(*device_, bind_plan(*plan, resources_));
}

void Engine::record_decode() {
  if (!device_->has_graphs()) return;
  slot_binder_->apply({.slot = limits_.max_slots, .sampling = greedy(), .prompt = {}, .sampled = {}});
  Staging& padding = staging_.front();
  pad_decode(0, limits_.max_decode_rows(), limits_, padding.block.step);
  padding.block.page_updates[0] = {.slot = limits_.max_slots, .index = 0, .page = limits_.num_pages};
  padding.num_page_updates = 1;
  send_inputs(padding);
  graphs_.emplace(*device_, executors_[GLM_PLAN_DECODE], resources_.state.step, limits_.max_decode_rows());
}

Engine::~Engine() {
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
  push({nullptr, &staging});
  ++submitted_;
}

glm_step_result Engine::collect() {
  if (collected_ == submitted_) {
    throw_if_failed();
    fail(GLM_INVALID_ARGUMENT, "no step is in flight, expected a submit before collect");
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ > collected_; });
    if (failed_ && (lost_ || collected_ >= finished_)) throw *failed_;
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
  const std::lock_guard lock(mutex_);
  if (!failed_) failed_.emplace(failure.status(), text(failure.what(), " in step ", step));
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
  while (true) {
    Command command;
    bool failed = false;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      command = std::move(queue_.front());
      queue_.pop_front();
      failed = failed_.has_value();
    }
    if (!failed) run_command(command);
    if (command.binding) continue;
    {
      const std::lock_guard lock(mutex_);
      ++ended_;
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
      ++finished_;
    }
  } catch (const Failure& failure) {
    note_failure(failure, finished_);
  }
}

void Engine::run_step(Staging& step) {
  send_inputs(step);
  step.started.record();
  run_plan(step);
  device_->copy_out(step.block.results, device_block_.results, step.block.result_bytes);
  step.finished.record();
}

void Engine::send_inputs(const Staging& step) {
  device_->copy_in(device_block_.inputs, step.block.inputs, step.block.input_bytes(step.num_page_updates));
  device_->update_pages(resources_.state.slots, device_block_.page_updates, step.num_page_updates);
}

void Engine::run_plan(const Staging& step) {
  const glm_step_inputs& from = step.block.step;
  if (graphs_ && step.plan == GLM_PLAN_DECODE && from.num_rows > 0) {
    graphs_->launch(from.num_rows);
    return;
  }
  set_counts(from);
  executors_[static_cast<size_t>(step.plan)].run(from.num_rows, from.num_samples);
}

void Engine::set_counts(const glm_step_inputs& from) {
  glm_step_inputs& to = resources_.state.step;
  to.num_rows = from.num_rows;
  to.num_seqs = from.num_seqs;
  to.num_samples = from.num_samples;
}

}  // namespace glm
