// What this machine can do at best: read bandwidth from memory, and f32 multiply-adds a second, both with N threads.
// usage: machine THREADS   prints {"read_bandwidth_gb_s": ..., "fma_gflops": ...}
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = size_t{512} << 20;  // far above any last-level cache
constexpr int kRepeats = 7;
#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kChains = 10;  // independent accumulators: hides the latency of the multiply-add
constexpr int64_t kFmaRounds = 4'000'000;

typedef float Vector __attribute__((vector_size(sizeof(float) * kLanes)));
typedef uint64_t Words __attribute__((vector_size(32)));

using Clock = std::chrono::steady_clock;

// Best of kRepeats of the time from the first thread's start of body(thread) to the last one's end.
double best_seconds(int num_threads, const std::function<void(int)>& body) {
  double best = 1e9;
  for (int r = 0; r < kRepeats; r++) {
    std::barrier ready(num_threads);
    std::vector<Clock::time_point> starts(num_threads), ends(num_threads);
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads; i++) {
      threads.emplace_back([&, i] {
        ready.arrive_and_wait();
        starts[i] = Clock::now();
        body(i);
        ends[i] = Clock::now();
      });
    }
    for (auto& thread : threads) thread.join();
    auto span = *std::max_element(ends.begin(), ends.end()) - *std::min_element(starts.begin(), starts.end());
    best = std::min(best, std::chrono::duration<double>(span).count());
  }
  return best;
}

double read_bandwidth(int num_threads) {
  std::vector<Words> data(kBytes / sizeof(Words), Words{1, 2, 3, 4});
  std::vector<uint64_t> sums(num_threads);
  size_t share = data.size() / num_threads;
  double seconds = best_seconds(num_threads, [&](int i) {
    Words a{}, b{}, c{}, d{};
    for (const Words *p = &data[i * share], *end = p + share / 4 * 4; p < end; p += 4) {
      a += p[0], b += p[1], c += p[2], d += p[3];
    }
    Words total = a + b + c + d;
    sums[i] = total[0] + total[3];
  });
  if (std::accumulate(sums.begin(), sums.end(), uint64_t{0}) == 0) std::abort();
  return kBytes / seconds / 1e9;
}

double fma_gflops(int num_threads) {
  std::vector<float> sums(num_threads);
  double seconds = best_seconds(num_threads, [&](int i) {
    volatile float one = 1.0f;  // unknown to the compiler, so that no chain can be folded into another
    Vector acc[kChains];
    for (auto& a : acc) a = Vector{} + one;
    Vector x = Vector{} + one, y = Vector{} + one;
    for (int64_t round = 0; round < kFmaRounds; round++) {
      for (auto& a : acc) a = a * x + y;
    }
    for (auto& a : acc) sums[i] += a[0];
  });
  if (std::accumulate(sums.begin(), sums.end(), 0.0f) == 0) std::abort();
  return 2.0 * num_threads * kFmaRounds * kChains * kLanes / seconds / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  int num_threads = argc > 1 ? std::atoi(argv[1]) : 0;
  if (num_threads < 1) {
    std::fprintf(stderr, "usage: machine THREADS (at least 1)\n");
    return 2;
  }
  std::printf("{\"read_bandwidth_gb_s\": %.2f, \"fma_gflops\": %.1f}\n", read_bandwidth(num_threads),
              fma_gflops(num_threads));
  return 0;
}
