#ifndef GLM_FUTHARK_BUFFERS_H
#define GLM_FUTHARK_BUFFERS_H

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"

namespace glm::fut {

/* OpenCL's buffers behind addresses. An OpenCL buffer has no address, and the table's callers compute with pointers: each
 * buffer has a range of the host's address space that nothing can read. */
class Buffers {
 public:
  struct Place {
    cl_mem buffer = nullptr;
    size_t offset = 0;
    size_t rest = 0; /* bytes from the place to the buffer's end */
  };

  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers();

  /* Takes the buffer over. NULL: no address space is left, and the buffer is still the caller's. */
  void* add(cl_mem buffer, size_t bytes);
  /* False: no buffer begins at the address. */
  bool remove(const void* data);
  /* Without a buffer if the address lies in none. */
  Place find(const void* data) const;
  /* A part of the buffer in which the address lies, kept until that is removed. */
  cl_int view(const void* data, size_t bytes, cl_mem* out);
  size_t bytes() const { return bytes_; }

  /* False: another array that the running entry writes overlaps this one, and one of them is a copy. */
  bool begin_write(const void* data, size_t bytes, bool copied);
  void end_write(const void* data);

 private:
  struct Block {
    cl_mem buffer;
    size_t bytes;
    std::map<std::pair<size_t, size_t>, cl_mem> views; /* by offset and bytes */
  };
  struct Written {
    const char* data;
    size_t bytes;
    bool copied;
  };

  static void release(const char* data, const Block& block);
  std::map<const char*, Block>::const_iterator block_of(const void* data) const;

  std::map<const char*, Block> blocks_;
  std::vector<Written> written_;
  size_t bytes_ = 0;
};

}  // namespace glm::fut

#endif
