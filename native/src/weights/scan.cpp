#include "weights/scan.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "memory/arena.h"
#include "support/dtype.h"
#include "support/error.h"
#include "weights/staged_upload.h"

namespace glm {
namespace {

// All threads' buffers stay in the last-level cache: written by a read, checked, and read by the copy to the device.
constexpr int64_t kChunkBytes = 1 << 20;
constexpr int64_t kPageBytes = 4096;
constexpr size_t kChunksAhead = 4;  // of a thread: what a disk is asked for before it is needed
constexpr auto kReportInterval = std::chrono::milliseconds(250);

struct Chunk {
  const ScanRegion* region;
  int64_t first_row;
  int64_t rows;
};

bool is_nan(std::byte code) {
  return (code & std::byte{0x7f}) == std::byte{0x7f};
}

// Eight codes at a time: adding 1 to the low seven bits carries into the eighth exactly where they are 0x7f. With four sums that do not wait
// for each other 51 GB/s of a cached megabyte on Zen 3, with one 16.
bool has_nan(const std::byte* data, int64_t count) {
  constexpr int64_t kWord = sizeof(uint64_t);
  std::array<uint64_t, 4> carries{};
  int64_t i = 0;
  for (; i + 4 * kWord <= count; i += 4 * kWord) {
    for (size_t j = 0; j < carries.size(); ++j) {
      uint64_t codes = 0;
      std::memcpy(&codes, data + i + static_cast<int64_t>(j) * kWord, kWord);
      carries[j] |= (codes & 0x7f7f7f7f7f7f7f7fu) + 0x0101010101010101u;
    }
  }
  const uint64_t all = carries[0] | carries[1] | carries[2] | carries[3];
  return (all & 0x8080808080808080u) != 0 || std::any_of(data + i, data + count, is_nan);
}

void touch(const std::byte* data, int64_t count) {
  for (int64_t i = 0; i < count; i += kPageBytes) {
    static_cast<void>(*static_cast<const volatile std::byte*>(data + i));
  }
}

std::vector<Chunk> cut(const std::vector<ScanRegion>& regions) {
  std::vector<Chunk> chunks;
  for (const ScanRegion& region : regions) {
    const int64_t rows = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, region.row_bytes));
    for (int64_t row = 0; row < region.rows; row += rows) {
      chunks.push_back({&region, row, std::min(rows, region.rows - row)});
    }
  }
  return chunks;
}

class Scan {
 public:
  Scan(std::vector<Chunk> chunks, const Device& device, const ScanProgress& progress)
      : chunks_(std::move(chunks)), device_(device), progress_(progress) {
    for (const Chunk& chunk : chunks_) {
      total_ += bytes(chunk);
      largest_ = std::max(largest_, chunk.rows * chunk.region->row_bytes);
    }
  }

  void run(int32_t num_threads) {
    if (progress_) progress_(0, total_);
    ahead_ = static_cast<size_t>(num_threads) * kChunksAhead;
    // In one piece: locking pages costs a call to a driver that lets one thread in at a time.
    Arena arena(device_, Arena::Kind::kHost);
    if (!device_.host_memory()) {
      staging_ = arena.allocate<std::byte>("loading weights", {num_threads, StagedUpload::kBuffers, largest_});
    }
    std::vector<std::thread> helpers;
    for (int32_t i = 1; i < num_threads; ++i) helpers.emplace_back([this, i] { work(i); });
    work(0);
    for (std::thread& helper : helpers) helper.join();
    if (error_) throw *error_;
    if (progress_) progress_(total_, total_);
  }

 private:
  static uint64_t bytes(const Chunk& chunk) { return static_cast<uint64_t>(chunk.rows * chunk.region->row_bytes); }

  void work(int32_t thread) {
    try {
      std::optional<StagedUpload> upload;
      if (staging_ != nullptr) {
        upload.emplace(device_, stream_, staging_ + thread * StagedUpload::kBuffers * largest_, largest_);
      }
      for (size_t i = next_++; i < chunks_.size() && !stop_; i = next_++) {
        if (i + ahead_ < chunks_.size()) announce(chunks_[i + ahead_]);
        const ScanRegion& region = *chunks_[i].region;
        if (region.target == nullptr) {
          check(chunks_[i], region.data + chunks_[i].first_row * region.stride_bytes, region.stride_bytes);
        } else if (upload) {
          send(chunks_[i], *upload);
        } else {
          gather(chunks_[i], target(chunks_[i]));
        }
        report(bytes(chunks_[i]));
      }
    } catch (const Failure& failure) {
      note(failure);
    }
  }

  static void announce(const Chunk& chunk) {
    const ScanRegion& region = *chunk.region;
    if (region.file == nullptr || region.row_bytes != region.stride_bytes) return;
    if (region.target == nullptr) return;  // faults of the mapping read ahead, in huge pages; an announcement would not
    region.file->announce(region.data + chunk.first_row * region.row_bytes, bytes(chunk));
  }

  void send(const Chunk& chunk, StagedUpload& upload) {
    std::byte* buffer = upload.buffer();
    gather(chunk, buffer);
    if (chunk.region->file != nullptr) check(chunk, buffer, chunk.region->row_bytes);
    upload.send(target(chunk), bytes(chunk));
  }

  static std::byte* target(const Chunk& chunk) {
    return chunk.region->target + chunk.first_row * chunk.region->row_bytes;
  }

  // The chunk's rows, without a gap.
  static void gather(const Chunk& chunk, std::byte* out) {
    const ScanRegion& region = *chunk.region;
    if (region.file == nullptr) {
      make_up(chunk, out);
    } else if (region.row_bytes == region.stride_bytes) {
      region.file->read(region.data + chunk.first_row * region.row_bytes, bytes(chunk), out);
    } else {
      for (int64_t i = 0; i < chunk.rows; ++i, out += region.row_bytes) {
        std::memcpy(out, region.data + (chunk.first_row + i) * region.stride_bytes,
                    static_cast<size_t>(region.row_bytes));
      }
    }
  }

  static void make_up(const Chunk& chunk, std::byte* out) {
    const ScanRegion& region = *chunk.region;
    const int64_t element = static_cast<int64_t>(element_bytes(region.dtype));
    const Synthetic values(region.synthetic, region.dtype);
    for (int64_t i = 0; i < chunk.rows; ++i, out += region.row_bytes) {
      const int64_t first = (chunk.first_row + i) * region.stride_bytes / element;
      values.write(region.first_index + first, region.row_bytes / element, out);
    }
  }

  // `data`: the chunk's rows, `stride` bytes apart.
  void check(const Chunk& chunk, const std::byte* data, int64_t stride) {
    const ScanRegion& region = *chunk.region;
    for (int64_t i = 0; i < chunk.rows; ++i, data += stride) {
      if (region.dtype != GLM_FP8_E4M3) {
        touch(data, region.row_bytes);
      } else if (has_nan(data, region.row_bytes)) {
        const int64_t column = std::find_if(data, data + region.row_bytes, is_nan) - data;
        fail(GLM_BAD_CHECKPOINT, "tensor ", region.tensor, " in ", region.shard, ": NaN at index ",
             region.first_index + (chunk.first_row + i) * region.stride_bytes + column, ", expected finite FP8 values");
      }
    }
  }

  void note(const Failure& failure) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_.emplace(failure);
    stop_ = true;
  }

  void report(uint64_t bytes) {
    if (!progress_) return;
    const std::lock_guard lock(mutex_);
    done_ += bytes;
    const auto now = std::chrono::steady_clock::now();
    if (now - reported_ < kReportInterval) return;
    reported_ = now;
    progress_(done_, total_);
  }

  std::vector<Chunk> chunks_;
  const Device& device_;
  const ScanProgress& progress_;
  uint64_t total_ = 0;
  int64_t largest_ = 0;
  std::byte* staging_ = nullptr;  // [threads][StagedUpload::kBuffers][largest_], if the device has memory of its own
  size_t ahead_ = 0;
  std::mutex stream_;
  std::atomic<size_t> next_ = 0;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  uint64_t done_ = 0;                               // guarded by mutex_
  std::chrono::steady_clock::time_point reported_;  // guarded by mutex_
  std::optional<Failure> error_;                    // guarded by mutex_ until the threads have ended
};

}  // namespace

void scan_weights(const std::vector<ScanRegion>& regions, const Device& device, int32_t num_threads,
                  const ScanProgress& progress) {
  Scan(cut(regions), device, progress).run(num_threads);
}

}  // namespace glm
