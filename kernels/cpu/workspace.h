#ifndef GLM_CPU_WORKSPACE_H
#define GLM_CPU_WORKSPACE_H

#include <cstddef>

#include "isa.h"

GLM_CPU_BEGIN

/* Lays blocks out one after another, each on cache lines of its own: the same code sizes a workspace (base NULL) and
 * hands it out. */
class WorkspaceLayout {
 public:
  explicit WorkspaceLayout(std::byte* base) : base_(base) {}

  template <typename T>
  T* take(size_t count) {
    std::byte* block = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(block);
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  size_t bytes_ = 0;
};

GLM_CPU_END

#endif
