#include "weights/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "support/error.h"

namespace glm {

MappedFile::MappedFile(const std::string& path) : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  const auto check = [this](bool ok, const char* action) {
    if (ok) return;
    const int code = errno;
    if (file_ >= 0) close(file_);
    fail(GLM_BAD_CHECKPOINT, "shard ", path_, ": cannot be ", action, ": ", std::strerror(code));
  };
  check(file_ >= 0, "opened");
  struct stat status{};
  check(fstat(file_, &status) == 0, "examined");
  size_ = static_cast<uint64_t>(status.st_size);
  if (size_ > 0) {
    void* data = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file_, 0);
    check(data != MAP_FAILED, "mapped");
    data_ = static_cast<const std::byte*>(data);
    madvise(data, size_, MADV_HUGEPAGE);  // where the file system can; otherwise pages stay small
  }
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
  close(file_);
}

void MappedFile::announce(const std::byte* from, size_t bytes) const {
  posix_fadvise(file_, from - data_, static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);  // reading works without it
}

void MappedFile::read(const std::byte* from, size_t bytes, std::byte* out) const {
  while (bytes > 0) {
    const ssize_t count = pread(file_, out, bytes, from - data_);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      fail(GLM_BAD_CHECKPOINT, "shard ", path_, ": cannot be read at byte ", from - data_, ": ",
           count < 0 ? std::strerror(errno) : "it has become shorter");
    }
    from += count;
    out += count;
    bytes -= static_cast<size_t>(count);
  }
}

}  // namespace glm
