// A kernel table for tests of the runtime: the CPU's operations on a device whose memory the host must not touch and
// whose stream runs late. Device memory is unreadable but for the time in which the stream runs, and the stream runs
// only when the host waits: whoever reads a result too early, or changes what a copy still has to read, is found out.
// One device at a time.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/memory.h"
#include "exec/ops.h"
#include "glm/kernels.h"

#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

using Call = std::function<glm_status()>;

// Passed: the records that the stream has come by.
struct glm_event {
  uint64_t recorded = 0;
  uint64_t passed = 0;
};

struct glm_graph {
  std::vector<Call> calls;
};

namespace {

constexpr size_t kMemoryBytes = size_t{1} << 28;
constexpr size_t kAlignment = 256;

const glm_kernels* cpu;
glm_kernels table;

std::recursive_mutex mutex;  // guards all below
std::byte* memory;           // kMemoryBytes, PROT_NONE unless the stream runs
size_t used;
size_t memory_limit = kMemoryBytes;
std::deque<Call> stream;
glm_graph* recording;
std::vector<std::pair<const std::byte*, size_t>> host_blocks;
std::string error_text;

std::atomic<int32_t> graph_launches;
std::atomic<int32_t> ops_enqueued;
std::atomic<int32_t> ops_run;
std::atomic<int32_t> ranges;
std::atomic<const char*> last_range;
thread_local const char* open_range;
std::atomic<int32_t> copies_in;
std::atomic<int32_t> slow_copies;  // from or to host memory that host_alloc did not give
std::atomic<int32_t> fail_op_in = -1;

void protect(int access) {
  if (memory != nullptr) mprotect(memory, kMemoryBytes, access);
}

glm_status enqueue(Call call) {
  const std::lock_guard lock(mutex);
  if (recording != nullptr) {
    recording->calls.push_back(std::move(call));
  } else {
    stream.push_back(std::move(call));
  }
  return GLM_OK;
}

glm_status run_until(const std::function<bool()>& reached) {
  const std::lock_guard lock(mutex);
  protect(PROT_READ | PROT_WRITE);
  glm_status status = GLM_OK;
  while (status == GLM_OK && !reached() && !stream.empty()) {
    const Call call = std::move(stream.front());
    stream.pop_front();
    status = call();
  }
  protect(PROT_NONE);
  if (status != GLM_OK) error_text = "told to fail";
  return status;
}

bool is_host_block(const void* data, size_t bytes) {
  const std::lock_guard lock(mutex);
  const auto* begin = static_cast<const std::byte*>(data);
  return std::ranges::any_of(host_blocks, [&](const auto& block) {
    return begin >= block.first && begin + bytes <= block.first + block.second;
  });
}

// The structs of the host are read now, as the contract has it; what they point to when the stream comes to the op.
template <class Args>
glm_status enqueue_op(glm_device* device, const Args* args) {
  ++ops_enqueued;
  Args copy = *args;
  glm_step_inputs step{};
  glm_slots slots{};
  if constexpr (requires { args->step; }) step = *args->step;
  if constexpr (requires { args->slots; }) slots = *args->slots;
  return enqueue([device, copy, step, slots]() mutable {
    ++ops_run;
    if (fail_op_in >= 0 && fail_op_in-- == 0) return GLM_DEVICE_ERROR;
    if constexpr (requires { copy.step; }) copy.step = &step;
    if constexpr (requires { copy.slots; }) copy.slots = &slots;
    return glm::call_op(*cpu, device, copy);
  });
}

const char* last_error(const glm_device*) {
  return error_text.c_str();
}

void device_close(glm_device* device) {
  stream.clear();
  cpu->device_close(device);
  if (memory != nullptr) munmap(memory, kMemoryBytes);
  memory = nullptr;
  used = 0;
}

glm_status memory_info(glm_device*, size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = memory_limit - used;
  *total_bytes = kMemoryBytes;
  return GLM_OK;
}

glm_status memory_alloc(glm_device*, size_t bytes, void** out) {
  const std::lock_guard lock(mutex);
  *out = nullptr;
  if (memory == nullptr) {
    void* mapped = mmap(nullptr, kMemoryBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return GLM_OUT_OF_MEMORY;
    memory = static_cast<std::byte*>(mapped);
  }
  if (bytes > memory_limit - used) return GLM_OUT_OF_MEMORY;
  *out = memory + used;
  used += std::min((bytes + kAlignment - 1) / kAlignment * kAlignment, memory_limit - used);
  return GLM_OK;
}

glm_status memory_free(glm_device*, void*) {
  return GLM_OK;
}

glm_status host_alloc(glm_device* device, size_t bytes, void** out) {
  const std::lock_guard lock(mutex);
  const glm_status status = glm::cpu::memory_alloc(device, bytes, out);
  if (status == GLM_OK) host_blocks.emplace_back(static_cast<const std::byte*>(*out), bytes);
  return status;
}

glm_status host_free(glm_device* device, void* data) {
  const std::lock_guard lock(mutex);
  std::erase_if(host_blocks, [data](const auto& block) { return block.first == data; });
  return glm::cpu::memory_free(device, data);
}

glm_status copy(glm_device* device, void* to, const void* from, size_t bytes) {
  return enqueue([=] { return glm::cpu::copy(device, to, from, bytes); });
}

glm_status copy_in(glm_device* device, void* to, const void* from, size_t bytes) {
  ++copies_in;
  slow_copies += !is_host_block(from, bytes);
  return copy(device, to, from, bytes);
}

glm_status copy_out(glm_device* device, void* to, const void* from, size_t bytes) {
  slow_copies += !is_host_block(to, bytes);
  return copy(device, to, from, bytes);
}

glm_status fill(glm_device* device, void* data, uint8_t byte, size_t bytes) {
  return enqueue([=] { return glm::cpu::fill(device, data, byte, bytes); });
}

glm_status update_pages(glm_device* device, const glm_slots* slots, const glm_page_update* updates, int32_t count) {
  return enqueue(
      [device, slots = *slots, updates, count] { return glm::cpu::update_pages(device, &slots, updates, count); });
}

glm_status synchronize(glm_device*) {
  return run_until([] { return false; });
}

glm_status event_create(glm_device*, glm_event** out) {
  *out = new glm_event;
  return GLM_OK;
}

void event_destroy(glm_device*, glm_event* event) {
  delete event;
}

glm_status event_record(glm_device*, glm_event* event) {
  const std::lock_guard lock(mutex);
  ++event->recorded;
  return enqueue([event] {
    ++event->passed;
    return GLM_OK;
  });
}

glm_status event_wait(glm_device*, glm_event* event) {
  return run_until([event] { return event->passed == event->recorded; });
}

glm_status event_elapsed(glm_device*, glm_event* from, glm_event* to, uint64_t* nanoseconds) {
  const std::lock_guard lock(mutex);
  *nanoseconds = 1;
  return from->passed == from->recorded && to->passed == to->recorded ? GLM_OK : GLM_INTERNAL;
}

glm_status graph_begin(glm_device*) {
  const std::lock_guard lock(mutex);
  recording = new glm_graph;
  return GLM_OK;
}

glm_status graph_end(glm_device*, glm_graph** out) {
  const std::lock_guard lock(mutex);
  *out = std::exchange(recording, nullptr);
  return GLM_OK;
}

glm_status graph_launch(glm_device*, glm_graph* graph) {
  ++graph_launches;
  for (const Call& call : graph->calls) enqueue(call);
  return GLM_OK;
}

void graph_free(glm_device*, glm_graph* graph) {
  delete graph;
}

}  // namespace

GLM_EXPORT const glm_kernels* glm_kernels_query(uint32_t version) {
  return version == GLM_KERNELS_VERSION && cpu != nullptr ? &table : nullptr;
}

// Before the table is used: `kernels_path` is the CPU's table. 0 if it cannot be loaded.
GLM_EXPORT int32_t glm_device_table_set_up(const char* kernels_path) {
  void* object = dlopen(kernels_path, RTLD_NOW | RTLD_LOCAL);
  if (object == nullptr) return 0;
  const auto query = reinterpret_cast<decltype(&glm_kernels_query)>(dlsym(object, "glm_kernels_query"));
  cpu = query == nullptr ? nullptr : query(GLM_KERNELS_VERSION);
  if (cpu == nullptr) return 0;
  table = *cpu;
  table.name = "late";
  table.flags = 0;
  table.device_close = device_close;
  table.last_error = last_error;
  table.memory_info = memory_info;
  table.memory_alloc = memory_alloc;
  table.memory_free = memory_free;
  table.host_alloc = host_alloc;
  table.host_free = host_free;
  table.copy_in = copy_in;
  table.copy_out = copy_out;
  table.fill = fill;
  table.update_pages = update_pages;
  table.synchronize = synchronize;
  table.event_create = event_create;
  table.event_destroy = event_destroy;
  table.event_record = event_record;
  table.event_wait = event_wait;
  table.event_elapsed = event_elapsed;
  table.graph_begin = graph_begin;
  table.graph_end = graph_end;
  table.graph_launch = graph_launch;
  table.graph_free = graph_free;
  table.group_create = nullptr;
  table.group_abort = nullptr;
  table.group_destroy = nullptr;
#define GLM_ENQUEUE(enumerator, field) table.field = enqueue_op<glm_##field##_args>;
  GLM_FOR_EACH_OP(GLM_ENQUEUE)
#undef GLM_ENQUEUE
  return 1;
}

// Of the next engine's device; 0: all there is.
GLM_EXPORT void glm_device_table_limit(size_t bytes) {
  memory_limit = bytes == 0 ? kMemoryBytes : bytes;
}

// The op that the stream comes to after `ops` more fails; -1: none.
GLM_EXPORT void glm_device_table_fail(int32_t ops) {
  fail_op_in = ops;
}

GLM_EXPORT int32_t glm_device_table_graph_launches() {
  return graph_launches;
}
GLM_EXPORT void glm_late_range_begin(const char* label) {
  open_range = label;
}
GLM_EXPORT void glm_late_range_end() {
  ranges += open_range != nullptr;
  last_range = std::exchange(open_range, nullptr);
}
// Ranges of ops that have ended, and the label of the last.
GLM_EXPORT int32_t glm_device_table_ranges() {
  return ranges;
}
GLM_EXPORT const char* glm_device_table_last_range() {
  return last_range;
}
GLM_EXPORT int32_t glm_device_table_ops_enqueued() {
  return ops_enqueued;
}
GLM_EXPORT int32_t glm_device_table_ops_run() {
  return ops_run;
}
GLM_EXPORT int32_t glm_device_table_copies_in() {
  return copies_in;
}
GLM_EXPORT int32_t glm_device_table_slow_copies() {
  return slow_copies;
}
