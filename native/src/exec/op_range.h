// The op that the calling thread is in, by its label, for profilers.
#pragma once

#include <string>

namespace glm {

// How a kernel table passes it on; NULL in a table that knows no profiler. What begins last ends first.
struct RangeCalls {
  void (*begin)(const char* label) = nullptr;
  void (*end)() = nullptr;
};

class OpRange {
 public:
  OpRange(const RangeCalls& calls, const std::string& label) : calls_(calls) {
    if (calls_.begin != nullptr) calls_.begin(label.c_str());
  }
  ~OpRange() {
    if (calls_.begin != nullptr) calls_.end();
  }
  OpRange(const OpRange&) = delete;
  OpRange& operator=(const OpRange&) = delete;

 private:
  const RangeCalls& calls_;
};

}  // namespace glm
