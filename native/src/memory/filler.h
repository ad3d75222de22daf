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

  template <class T>
  struct Array {
    T* out;    // in the arena
    T* image;  // where the host writes it
    size_t bytes;
  };

  // An array in the arena whose image is to be filled, and then sent. The device has it once `finish` has returned.
  template <class T>
  Array<T> allocate(const std::string& what, std::initializer_list<int64_t> sizes) {
    T* out = arena_.allocate<T>(what, sizes);
    if (arena_.device().host_memory()) return {out, out, 0};
    const size_t bytes = Arena::byte_count(what, sizeof(T), sizes);
    images_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
    return {out, reinterpret_cast<T*>(images_.back().get()), bytes};
  }

  template <class T>
  void send(const Array<T>& array) {
    if (array.out != array.image) arena_.device().copy_in(array.out, array.image, array.bytes);
  }

  // An array in the arena, with what `fill(T*)` wrote.
  template <class T, class Fill>
  T* make(const std::string& what, std::initializer_list<int64_t> sizes, Fill fill) {
    const Array<T> array = allocate<T>(what, sizes);
    fill(array.image);
    send(array);
    return array.out;
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
