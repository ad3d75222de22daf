#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace glm::cpu {

namespace {

/* Longer than the gap between the operations of one step, shorter than the gap between steps. */
constexpr std::chrono::microseconds kSpin{100};
constexpr int kSpinsPerClockRead = 32;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/* Denormals count while this lives, whatever the thread had set: FP8 weights pass through them. (Libraries built with -ffast-math
 * switch them off for the whole process.) */
class KeepDenormals {
#if defined(__x86_64__)
 public:
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushToZeroAndDenormalsAreZero); }
  ~KeepDenormals() { _mm_setcsr(saved_); }
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;

 private:
  static constexpr unsigned kFlushToZeroAndDenormalsAreZero = 0x8040;
  unsigned saved_;
#endif
};

/* Polls `ready` for kSpin; what it said last. */
template <typename Ready>
bool spin_until(Ready ready) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads), threads_(new std::thread[num_threads]), cursors_(new Cursor[num_threads]) {
  try {
    for (int i = 1; i < num_threads_; ++i) threads_[i] = std::thread(&ThreadPool::worker, this, i);
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::stop() {
  stopping_.store(true);
  loop_.fetch_add(1);
  loop_.notify_all();
  for (int i = 1; i < num_threads_; ++i) {
    if (threads_[i].joinable()) threads_[i].join();
  }
}

void ThreadPool::run(int64_t n, int64_t grain, Body body, void* context) {
  if (n <= 0) return;
  [[maybe_unused]] const KeepDenormals keep;
  const auto chunks = static_cast<uint32_t>((n + grain - 1) / grain);
  if (chunks == 1 || num_threads_ == 1) {
    body(context, 0, n, 0);
    return;
  }
  body_ = body;
  context_ = context;
  n_ = n;
  grain_ = grain;
  chunks_ = chunks;
  done_.store(0, std::memory_order_relaxed);
  const uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
  for (int owner = 0; owner < num_threads_; ++owner) {
    const uint32_t share = share_begin(owner + 1) - share_begin(owner);
    cursors_[owner].value.store(static_cast<uint64_t>(loop) << 32 | share, std::memory_order_release);
  }
  loop_.store(loop); /* sequentially consistent, so that notify_all sees every sleeper */
  loop_.notify_all();
  run_chunks(loop, 0);
  await_done(chunks);
}

uint32_t ThreadPool::share_begin(int owner) const {
  return static_cast<uint32_t>(static_cast<uint64_t>(chunks_) * static_cast<uint32_t>(owner) /
                               static_cast<uint32_t>(num_threads_));
}

void ThreadPool::run_chunks(uint32_t loop, int thread) {
  for (int i = 0; i < num_threads_; ++i) run_share(loop, (thread + i) % num_threads_, thread);
}

void ThreadPool::run_share(uint32_t loop, int owner, int thread) {
  std::atomic<uint64_t>& share = cursors_[owner].value;
  uint64_t cursor = share.load(std::memory_order_acquire);
  while (cursor >> 32 == loop && static_cast<uint32_t>(cursor) != 0) {
    if (!share.compare_exchange_weak(cursor, cursor - 1, std::memory_order_acq_rel, std::memory_order_acquire))
      continue;
    /* The claimed chunk keeps the loop alive: until it is counted as done, these members do not change. */
    const int64_t begin = (share_begin(owner + 1) - static_cast<uint32_t>(cursor)) * grain_;
    const uint32_t chunks = chunks_;
    body_(context_, begin, std::min(n_, begin + grain_), thread);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) done_.notify_one();
    cursor = share.load(std::memory_order_acquire);
  }
}

void ThreadPool::await_done(uint32_t chunks) {
  const auto finished = [&] { return done_.load(std::memory_order_acquire) == chunks; };
  if (spin_until(finished)) return;
  for (uint32_t seen = done_.load(); seen != chunks; seen = done_.load()) done_.wait(seen);
}

void ThreadPool::await_loop(uint32_t seen) {
  if (spin_until([&] { return loop_.load(std::memory_order_acquire) != seen; })) return;
  loop_.wait(seen);
}

void ThreadPool::worker(int thread) {
  [[maybe_unused]] const KeepDenormals keep;
  uint32_t seen = 0;
  for (;;) {
    await_loop(seen);
    seen = loop_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_acquire)) return;
    run_chunks(seen, thread);
  }
}

}  // namespace glm::cpu
