#ifndef GLM_CPU_THREAD_POOL_H
#define GLM_CPU_THREAD_POOL_H

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace glm::cpu {

/* Threads that share the chunks of one loop at a time; the caller is thread 0. Each starts with a run of adjacent chunks,
 * so that two seldom write to one cache line or read one stream of memory, and then helps the others. Which thread runs a
 * chunk is not fixed, so a chunk's result may depend on its indices only. Workers spin briefly after a loop, then sleep.
 */
class ThreadPool {
 public:
  using Body = void (*)(void* context, int64_t begin, int64_t end, int thread);

  /* Throws std::system_error if a thread cannot be started. num_threads >= 1, the caller included. */
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  /* Calls body for [0, n) in chunks of `grain` (the last may be short) and returns when all are done. With one chunk it
   * runs on the caller. n / grain < 2^32. Not reentrant. */
  void run(int64_t n, int64_t grain, Body body, void* context);

 private:
  void worker(int thread);
  void await_loop(uint32_t seen);
  void run_chunks(uint32_t loop, int thread);
  void run_share(uint32_t loop, int owner, int thread);
  uint32_t share_begin(int owner) const;
  void await_done(uint32_t chunks);
  void stop();

  int num_threads_;
  std::unique_ptr<std::thread[]> threads_;

  Body body_ = nullptr;
  void* context_ = nullptr;
  int64_t n_ = 0;
  int64_t grain_ = 1;
  uint32_t chunks_ = 0;

  /* Of each thread's share of a loop: the loop's number in the high half, chunks not yet claimed in the low half. One
   * compare-and-swap claims a chunk of that very loop. */
  struct alignas(64) Cursor {
    std::atomic<uint64_t> value{0};
  };
  std::unique_ptr<Cursor[]> cursors_;
  alignas(64) std::atomic<uint32_t> done_{0}; /* finished chunks */
  alignas(64) std::atomic<uint32_t> loop_{0};
  std::atomic<bool> stopping_{false};
};

/* function(begin, end, thread) over [0, n) in chunks of `grain`. */
template <typename Function>
void parallel_for(ThreadPool& pool, int64_t n, int64_t grain, Function&& function) {
  pool.run(
      n, grain,
      [](void* context, int64_t begin, int64_t end, int thread) {
        (*static_cast<std::remove_reference_t<Function>*>(context))(begin, end, thread);
      },
      &function);
}

}  // namespace glm::cpu

#endif
