// A kernel table for tests of the runtime: counts calls, fails or hangs on demand, and computes next to nothing, so that
// what the runtime handed over can be read back. Ranks wait for each other in sums. Not for use from several
// engines at once.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/memory.h"
#include "cpu/rendezvous.h"
#include "glm/kernels.h"

#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

struct glm_group {
  glm::cpu::Rendezvous meeting;
};

struct glm_device {
  glm_group* group = nullptr;
  int32_t rank = 0;
};

namespace {

constexpr int32_t kObservedToken = 7;
constexpr int32_t kEveryRank = -1;

struct OpState {
  std::atomic<int32_t> calls = 0;
  std::atomic<int32_t> rows = -1;     // of the newest call
  std::atomic<int32_t> fail_in = -1;  // calls until one fails; -1: never
  std::atomic<glm_status> status = GLM_OK;
  std::atomic<int32_t> hang_in = -1;  // calls until one hangs; -1: never
};

std::array<OpState, GLM_OP_COUNT> states;
std::atomic<int32_t> faulty_rank = kEveryRank;
std::atomic<int32_t> hanging = 0;    // calls that hang now
std::atomic<uint32_t> releases = 0;  // of calls that hang
std::atomic<int32_t> open_devices = 0;
std::array<std::atomic<uint64_t>, GLM_MAX_RANKS> exchanges_begun;
int32_t group_ranks = 0;
std::atomic<glm_status> open_status = GLM_OK;
std::atomic<uint32_t> spoken_version = GLM_KERNELS_VERSION;
std::atomic<size_t> workspace_wanted = 0;
std::atomic<size_t> workspace_given = 0;
glm_kernels table;

void release() {
  ++releases;
  releases.notify_all();
}

void hang() {
  const uint32_t seen = releases;
  ++hanging;
  hanging.notify_all();
  releases.wait(seen);
  --hanging;
  hanging.notify_all();
}

glm_status record(const glm_device* device, glm_op op, int32_t rows) {
  OpState& state = states[op];
  ++state.calls;
  state.rows = rows;
  if (faulty_rank != kEveryRank && faulty_rank != device->rank) return GLM_OK;
  if (state.hang_in >= 0 && state.hang_in-- == 0) hang();
  if (state.fail_in < 0) return GLM_OK;
  return state.fail_in-- == 0 ? state.status.load() : GLM_OK;
}

template <glm_op Op, class Args>
glm_status count(glm_device* device, const Args* args) {
  return record(device, Op, args->rows);
}

glm_status meet(const glm_device* device, glm_status status) {
  if (status != GLM_OK || device->group == nullptr) return status;
  return device->group->meeting.arrive() ? GLM_OK : GLM_DEVICE_ERROR;
}

glm_status all_reduce(glm_device* device, const glm_all_reduce_args* args) {
  return meet(device, record(device, GLM_OP_ALL_REDUCE, args->rows));
}

glm_status rms_norm(glm_device* device, const glm_rms_norm_args* args) {
  const glm_status status = record(device, GLM_OP_RMS_NORM, args->rows);
  return args->reduce != 0 ? meet(device, status) : status;
}

glm_status group_create(glm_device* const* devices, int32_t num_ranks, glm_group** out, char*, size_t) {
  *out = new glm_group{glm::cpu::Rendezvous(num_ranks)};
  group_ranks = num_ranks;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    devices[rank]->group = *out;
    devices[rank]->rank = rank;
  }
  return GLM_OK;
}

void group_progress(glm_group*, uint64_t* begun) {
  std::copy_n(exchanges_begun.begin(), group_ranks, begun);
}

void group_abort(glm_group* group) {
  group->meeting.abort();
}

void group_destroy(glm_group* group) {
  delete group;
}

// The token ids themselves, so that a buffer shows what a step was given.
glm_status embed(glm_device* device, const glm_embed_args* args) {
  for (int32_t row = 0; row < args->rows; ++row) {
    const int32_t given = args->step->token_ids[row];
    const int32_t token = given >= 0 ? given : args->slots->last_token[args->step->row_slots[row]];
    auto* out = static_cast<float*>(args->out.data) + row * args->out.stride;
    std::fill_n(out, args->out.cols, static_cast<float>(token));
  }
  return record(device, GLM_OP_EMBED, args->rows);
}

// Token: the position after the row's. Log-probability: counts of token 7. Best ids: the slot's first pages.
glm_status sample(glm_device* device, const glm_sample_args* args) {
  const glm_step_inputs& step = *args->step;
  const glm_slots& slots = *args->slots;
  for (int32_t i = 0; i < args->rows; ++i) {
    const int32_t slot = step.sample_slots[i];
    const int32_t token = (step.positions[step.sample_rows[i]] + 1) % slots.vocab;
    step.out_token_ids[i] = token;
    step.out_logprobs[i] = slots.counts[int64_t{slot} * slots.vocab + kObservedToken];
    for (int32_t j = 0; j < GLM_MAX_LOGPROBS; ++j) {
      const bool present = j < slots.max_pages;
      step.out_top_ids[i * GLM_MAX_LOGPROBS + j] = present ? slots.page_table[slot * slots.max_pages + j] : -1;
      step.out_top_logprobs[i * GLM_MAX_LOGPROBS + j] = slots.sampling[slot].temperature;
    }
    slots.last_token[slot] = token;
  }
  return record(device, GLM_OP_SAMPLE, args->rows);
}

glm_status device_open(const glm_device_options*, glm_device** out, char* error, size_t error_size) {
  *out = nullptr;
  if (open_status != GLM_OK) {
    std::snprintf(error, error_size, "told to fail");
    return open_status;
  }
  ++open_devices;
  *out = new glm_device{};
  return GLM_OK;
}

void device_close(glm_device* device) {
  --open_devices;
  delete device;
}

const char* device_description(const glm_device*) {
  return "test device";
}

size_t workspace_bytes(const glm_device*, glm_op op, const void*) {
  return op == GLM_OP_SAMPLE ? workspace_wanted.load() : 0;
}

void set_workspace(glm_device*, void* data, size_t bytes) {
  std::memset(data, 0xff, bytes);
  workspace_given = bytes;
}

glm_kernels full_table() {
  return {.version = GLM_KERNELS_VERSION,
          .name = "fault",
          .flags = GLM_TABLE_HOST_MEMORY,
          .device_open = device_open,
          .device_close = device_close,
          .device_description = device_description,
          .workspace_bytes = workspace_bytes,
          .set_workspace = set_workspace,
          .last_error = glm::cpu::last_error,
          .memory_info = glm::cpu::memory_info,
          .memory_alloc = glm::cpu::memory_alloc,
          .memory_free = glm::cpu::memory_free,
          .host_alloc = glm::cpu::memory_alloc,
          .host_free = glm::cpu::memory_free,
          .copy_in = glm::cpu::copy,
          .copy_out = glm::cpu::copy,
          .fill = glm::cpu::fill,
          .update_pages = glm::cpu::update_pages,
          .synchronize = glm::cpu::synchronize,
          .event_create = glm::cpu::event_create,
          .event_destroy = glm::cpu::event_destroy,
          .event_record = glm::cpu::event_record,
          .event_wait = glm::cpu::event_wait,
          .event_elapsed = glm::cpu::event_elapsed,
          .graph_begin = nullptr,
          .graph_end = nullptr,
          .graph_launch = nullptr,
          .graph_free = nullptr,
          .group_create = group_create,
          .group_abort = group_abort,
          .group_destroy = group_destroy,
          .embed = embed,
          .rms_norm = rms_norm,
          .quantize = count<GLM_OP_QUANTIZE>,
          .linear = count<GLM_OP_LINEAR>,
          .qk_norm_rope_store = count<GLM_OP_QK_NORM_ROPE_STORE>,
          .paged_attention = count<GLM_OP_PAGED_ATTENTION>,
          .silu_mul = count<GLM_OP_SILU_MUL>,
          .moe_route = count<GLM_OP_MOE_ROUTE>,
          .moe_group = count<GLM_OP_MOE_GROUP>,
          .moe_gate_up = count<GLM_OP_MOE_GATE_UP>,
          .moe_down = count<GLM_OP_MOE_DOWN>,
          .all_reduce = all_reduce,
          .gather_rows = count<GLM_OP_GATHER_ROWS>,
          .sample = sample,
          .reduce_scatter = nullptr,
          .all_gather = nullptr,
          .moe_dispatch = nullptr,
          .moe_down_each = nullptr,
          .moe_combine = nullptr,
          .group_progress = nullptr};
}

}  // namespace

GLM_EXPORT const glm_kernels* glm_kernels_query(uint32_t version) {
  return version == spoken_version ? &table : nullptr;
}

GLM_EXPORT void glm_fault_reset() {
  for (OpState& state : states) {
    state.calls = 0;
    state.rows = -1;
    state.fail_in = -1;
    state.hang_in = -1;
  }
  release();
  faulty_rank = kEveryRank;
  open_status = GLM_OK;
  spoken_version = GLM_KERNELS_VERSION;
  workspace_wanted = 0;
  table = full_table();
}

// The call of `op` after `calls` more fails with `status`.
GLM_EXPORT void glm_fault_fail(int32_t op, int32_t calls, int32_t status) {
  states[op].status = static_cast<glm_status>(status);
  states[op].fail_in = calls;
}

// Failures and hangs are this rank's only.
GLM_EXPORT void glm_fault_on_rank(int32_t rank) {
  faulty_rank = rank;
}
// The call of `op` after `calls` more does not return until a release or reset.
GLM_EXPORT void glm_fault_hang(int32_t op, int32_t calls) {
  states[op].hang_in = calls;
}
GLM_EXPORT void glm_fault_release() {
  release();
}
// Until `calls` of them hang.
GLM_EXPORT void glm_fault_wait_hanging(int32_t calls) {
  for (int32_t seen = hanging; seen != calls; seen = hanging) hanging.wait(seen);
}
GLM_EXPORT void glm_fault_remove_groups() {
  table.group_create = nullptr;
}

// Ranks' devices run behind the calls: this one has begun so many exchanges.
GLM_EXPORT void glm_fault_set_begun(int32_t rank, uint64_t exchanges) {
  exchanges_begun[static_cast<size_t>(rank)] = exchanges;
  table.group_progress = group_progress;
}

GLM_EXPORT void glm_fault_fail_open(int32_t status) {
  open_status = static_cast<glm_status>(status);
}
GLM_EXPORT void glm_fault_speak(uint32_t version) {
  spoken_version = version;
}
GLM_EXPORT void glm_fault_want_workspace(size_t bytes) {
  workspace_wanted = bytes;
}
GLM_EXPORT void glm_fault_remove_norms() {
  table.rms_norm = nullptr, table.quantize = nullptr;
}

GLM_EXPORT int32_t glm_fault_calls(int32_t op) {
  return states[op].calls;
}
GLM_EXPORT int32_t glm_fault_rows(int32_t op) {
  return states[op].rows;
}
GLM_EXPORT size_t glm_fault_workspace() {
  return workspace_given;
}
GLM_EXPORT int32_t glm_fault_open_devices() {
  return open_devices;
}

namespace {

// For a process that nobody calls into: GLM_FAULT="hang OP RANK CALLS" or "fail OP RANK CALLS", in numbers.
bool initialise() {
  glm_fault_reset();
  const char* fault = std::getenv("GLM_FAULT");
  if (fault == nullptr) return true;
  char what[5] = "";
  int32_t op = 0;
  int32_t rank = 0;
  int32_t calls = 0;
  if (std::sscanf(fault, "%4s %d %d %d", what, &op, &rank, &calls) != 4) std::abort();
  faulty_rank = rank;
  if (std::strcmp(what, "hang") == 0) {
    glm_fault_hang(op, calls);
  } else {
    glm_fault_fail(op, calls, GLM_DEVICE_ERROR);
  }
  return true;
}

const bool initialised = initialise();

}  // namespace
