// Arrays that the host computes for the device: in place where the device's memory is the host's, else by way of a copy.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "memory/arena.h"

namespace glm {

class Filler {
 public:
  explicit Filler(Arena& arena) : arena_(arena) {}
  ~Filler() {
    const Device& device = arena_.device();
    if (!images_.empty()) device.kernels().synchronize(device.handle());  // after a failure: copies still read them
  }
  Filler(const Filler&) = delete;
  Filler& operator=(const Filler&) = delete;

  // An array in the arena, with what `fill(T*)` wrote. The device has it once `finish` has returned.
  template <class T, class Fill>
  T* make(const std::string& what, std::initializer_list<int64_t> sizes, Fill fill) {
    T* out = arena_.allocate<T>(what, sizes);
    if (arena_.device().host_memory()) {
      fill(out);
      return out;
    }
    const size_t bytes = Arena::byte_count(what, sizeof(T), sizes);
    images_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
    T* image = reinterpret_cast<T*>(images_.back().get());
    fill(image);
    arena_.device().copy_in(out, image, bytes);
    return out;
  }

  void finish() {
    arena_.device().synchronize();
    images_.clear();
  }

 private:
  Arena& arena_;
  std::vector<std::unique_ptr<std::byte[]>> images_;  // until the device has passed the copies
};

}  // namespace glm
