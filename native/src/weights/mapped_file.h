// A shard mapped read-only and shared: its pages are the file's own, and no private copy exists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace glm {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

  // Bytes that lie at `from` in the mapping will be used soon: a disk may begin to read them.
  void announce(const std::byte* from, size_t bytes) const;

  // Copies bytes that lie at `from` in the mapping, read from the file: that costs no page faults.
  void read(const std::byte* from, size_t bytes, std::byte* out) const;

 private:
  std::string path_;
  int file_ = -1;
  const std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace glm
