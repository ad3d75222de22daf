// Errors inside the runtime: one exception type, turned into a status and a line of text at the C boundary.
#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <utility>

#include "glm/kernels.h"

namespace glm {

class Failure : public std::exception {
 public:
  Failure(glm_status status, std::string message) : status_(status), message_(std::move(message)) {}
  glm_status status() const noexcept { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  glm_status status_;
  std::string message_;
};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(glm_status status, const Parts&... parts) {
  throw Failure(status, text(parts...));
}

}  // namespace glm
