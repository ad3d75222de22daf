#include "engine/engine.h"

#include <sched.h>

#include <chrono>
#include <cstring>

#include "support/dtype.h"
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
  return {options.max_rows, options.max_samples, options.max_slots, options.max_context, options.num_pages};
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
  allocate_and_load(options, join_declarations(mixed, decode));
  make_executors(mixed, decode);
  thread_ = std::thread([this] { run(); });
}

void Engine::allocate_and_load(const glm_engine_options& options, const Declarations& declarations) {
  resources_.act = declarations.act;
  resources_.limits = limits_;
  resources_.state = make_state(declarations, limits_, scratch_arena_, kv_arena_);
  for (Staging& staging : staging_) staging = make_staging(limits_, scratch_arena_);
  mirror_.emplace(limits_, declarations.vocab);

  tensors_ = std::make_unique<TensorTable>(std::span(options.tensors, static_cast<size_t>(options.num_tensors)));
  resources_.weights = load_weights(declarations, *tensors_, weight_arena_);
  ScanProgress progress;
  if (options.progress != nullptr) {
    progress = [&options](uint64_t done, uint64_t total) { options.progress(options.progress_context, done, total); };
  }
  scan_weights(resources_.weights.regions, scan_threads(options.num_threads), progress);
}

void Engine::make_executors(const Plan& mixed, const Plan& decode) {
  size_t workspace = 0;
  for (const Plan* plan : {&mixed, &decode}) {
    executors_.emplace_back(table_->kernels(), table_->device(), bind_plan(*plan, resources_));
    workspace = std::max(workspace, executors_.back().workspace_bytes());
  }
  table_->kernels().set_workspace(table_->device(), scratch_arena_.allocate_bytes("workspace of ops", workspace),
                                  workspace);
}

Engine::~Engine() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
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
  info.weight_bytes_copied = weight_arena_.bytes();
  info.kv_bytes = kv_arena_.bytes();
  info.scratch_bytes = scratch_arena_.bytes();
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
  fill_staging(batch, staging);
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
    if (collected_ >= finished_ && failed_) throw *failed_;
  }
  const Staging& staging = staging_[collected_++ % staging_.size()];
  return {.num_samples = staging.inputs.num_samples,
          .token_ids = staging.inputs.out_token_ids,
          .logprobs = staging.inputs.out_logprobs,
          .top_ids = staging.inputs.out_top_ids,
          .top_logprobs = staging.inputs.out_top_logprobs,
          .device_ns = staging.device_ns};
}

void Engine::read_buffer(const std::string& name, int32_t rows, void* out, size_t bytes) {
  throw_if_failed();
  if (collected_ != submitted_) fail(GLM_INVALID_ARGUMENT, "the engine is not idle: collect its steps first");
  const auto found = resources_.state.buffers.find(name);
  if (found == resources_.state.buffers.end()) fail(GLM_INVALID_ARGUMENT, "no buffer is named '", name, "'");
  const Buffer& buffer = found->second;
  if (rows < 0 || rows > buffer.rows) {
    fail(GLM_INVALID_ARGUMENT, "buffer ", name, ": rows ", rows, ", expected 0 to ", buffer.rows);
  }
  const size_t size =
      static_cast<size_t>(rows) * static_cast<size_t>(buffer.tensor.cols) * element_bytes(buffer.tensor.dtype);
  if (bytes != size) {
    fail(GLM_INVALID_ARGUMENT, "buffer ", name, ": ", bytes, " bytes, expected ", size, ": ", rows, " rows of ",
         buffer.tensor.cols, " ", dtype_name(buffer.tensor.dtype));
  }
  if (size > 0) std::memcpy(out, buffer.tensor.data, size);
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
    if (command.binding) {
      apply_binding(*command.binding, resources_.state.slots);
      continue;
    }
    if (!failed) run_step(*command.step);
    {
      const std::lock_guard lock(mutex_);
      ++ended_;
    }
    changed_.notify_all();
  }
}

void Engine::run_step(Staging& step) {
  apply_page_updates(step.page_updates, resources_.state.slots);
  copy_inputs(step.inputs, resources_.state.step);
  try {
    const auto start = std::chrono::steady_clock::now();
    executors_[step.decode() ? 1 : 0].run(step.inputs.num_rows, step.inputs.num_samples);
    const auto end = std::chrono::steady_clock::now();
    step.device_ns = static_cast<uint64_t>(std::chrono::nanoseconds(end - start).count());
  } catch (const Failure& failure) {
    const std::lock_guard lock(mutex_);
    failed_.emplace(failure.status(), text(failure.what(), " in step ", finished_.load()));
    return;
  }
  copy_outputs(resources_.state.step, step.inputs);
  ++finished_;
}

}  // namespace glm
