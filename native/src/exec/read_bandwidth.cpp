#include "exec/read_bandwidth.h"

#include <sched.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <thread>
#include <vector>

#include "exec/kernel_table.h"
#include "memory/arena.h"
#include "memory/device.h"
#include "support/error.h"

namespace glm {
namespace {

constexpr int kRepeats = 7;
constexpr size_t kMostBytes = size_t{4} << 30;
constexpr size_t kHostBytes = size_t{512} << 20;  // far above any last-level cache

using Words = uint64_t __attribute__((vector_size(32)));
using ReadMemory = glm_status (*)(glm_device*, void*, size_t);

// Of one thread. What it returns keeps the compiler from leaving the reads out.
uint64_t read_words(const Words* data, size_t count) {
  Words a{}, b{}, c{}, d{};
  for (size_t i = 0; i + 4 <= count; i += 4) {
    a ^= data[i], b ^= data[i + 1], c ^= data[i + 2], d ^= data[i + 3];
  }
  const Words all = a ^ b ^ c ^ d;
  return all[0] ^ all[1] ^ all[2] ^ all[3];
}

double host_seconds(const std::byte* data, size_t bytes, int32_t num_threads) {
  using Clock = std::chrono::steady_clock;
  const size_t threads = static_cast<size_t>(num_threads);
  const size_t share = bytes / sizeof(Words) / threads;
  std::vector<Clock::time_point> starts(threads), ends(threads);
  std::vector<uint64_t> sums(threads);
  std::barrier ready(num_threads);
  const auto read = [&](size_t i) {
    ready.arrive_and_wait();
    starts[i] = Clock::now();
    sums[i] = read_words(reinterpret_cast<const Words*>(data) + i * share, share);
    ends[i] = Clock::now();
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < threads; ++i) helpers.emplace_back(read, i);
  read(0);
  for (std::thread& helper : helpers) helper.join();
  return std::chrono::duration<double>(*std::ranges::max_element(ends) - *std::ranges::min_element(starts)).count();
}

double device_seconds(const Device& device, ReadMemory read, void* data, size_t bytes) {
  const Event begin(device);
  const Event end(device);
  begin.record();
  device.check(read(device.handle(), data, bytes), "a read of memory");
  end.record();
  end.wait();
  return static_cast<double>(begin.nanoseconds_until(end)) / 1e9;
}

int32_t num_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? std::max(1, CPU_COUNT(&cores)) : 1;
}

}  // namespace

double read_bandwidth(const std::string& kernels_path, const glm_device_options& options) {
  KernelTable table(kernels_path, {});
  table.open_device(options);
  const Device device(table.kernels(), table.device());
  const std::string name = text("glm_", table.kernels().name, "_read");
  const auto read = reinterpret_cast<ReadMemory>(table.symbol(name));
  if (!device.host_memory() && read == nullptr) {
    fail(GLM_UNSUPPORTED, "kernel table ", table.kernels().name, " does not export ", name);
  }
  const size_t bytes = device.host_memory() ? kHostBytes : std::min(kMostBytes, device.free_bytes() / 2) / 4096 * 4096;
  Arena arena(device, Arena::Kind::kDevice);
  auto* data = static_cast<std::byte*>(arena.allocate_bytes("measuring the read bandwidth", bytes));
  device.fill(data, 0x5a, bytes);
  device.synchronize();
  const int32_t threads = options.num_threads > 0 ? options.num_threads : num_cores();
  double best = 1e9;
  for (int i = 0; i < kRepeats; ++i) {
    const double seconds =
        device.host_memory() ? host_seconds(data, bytes, threads) : device_seconds(device, read, data, bytes);
    best = std::min(best, seconds);
  }
  return static_cast<double>(bytes) / best;
}

}  // namespace glm
