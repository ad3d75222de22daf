#include "weights/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "support/error.h"

namespace glm {

MappedFile::MappedFile(const std::string& path) {
  const auto check = [&path](bool ok, const char* action, int file) {
    if (ok) return;
    const int code = errno;
    if (file >= 0) close(file);
    fail(GLM_BAD_CHECKPOINT, "shard ", path, ": cannot be ", action, ": ", std::strerror(code));
  };
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  check(file >= 0, "opened", file);
  struct stat status{};
  check(fstat(file, &status) == 0, "examined", file);
  size_ = static_cast<uint64_t>(status.st_size);
  if (size_ > 0) {
    void* data = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    check(data != MAP_FAILED, "mapped", file);
    data_ = static_cast<const std::byte*>(data);
    madvise(data, size_, MADV_WILLNEED);  // a hint: reading works without it
  }
  close(file);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace glm
