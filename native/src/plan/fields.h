// One line of a plan, taken apart: words by position, then key=value pairs.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"
#include "support/error.h"

namespace glm {

// Whole-text conversions; nothing where the text is not exactly a number of the type.
std::optional<int32_t> parse_int32(std::string_view text);
std::optional<float> parse_float(std::string_view text);

class Fields {
 public:
  Fields(std::string_view plan, int32_t line, std::string_view text);

  PlanLine line() const { return PlanLine{line_}; }

  template <class... Parts>
  [[noreturn]] void error(const Parts&... parts) const {
    fail(GLM_INVALID_ARGUMENT, plan_, " plan, line ", line_, ": ", parts...);
  }

  // The next word; `what` says what it should be.
  std::string_view word(std::string_view what);
  std::string name(std::string_view what);
  int32_t size(std::string_view what);

  // Each value is taken once; `finish` finds what nobody took.
  std::optional<std::string_view> take(std::string_view key);
  std::string_view value(std::string_view key);
  int32_t size_value(std::string_view key);
  std::map<std::string, std::string, std::less<>> take_all();
  void finish() const;

  int32_t to_size(std::string_view what, std::string_view text) const;
  // Integers between commas, each from 0 to `count` - 1 and each once.
  std::vector<int32_t> to_permutation(std::string_view what, std::string_view text, int32_t count) const;
  Range to_range(std::string_view what, std::string_view text) const;

  template <class T, size_t N>
  T choose(std::string_view what, std::string_view text, const std::pair<std::string_view, T> (&choices)[N]) const {
    std::string known;
    for (const auto& [spelling, result] : choices) {
      if (spelling == text) return result;
      known += known.empty() ? "" : ", ";
      known += spelling;
    }
    error(what, " '", text, "', expected one of ", known);
  }

 private:
  void add(std::string_view field);

  std::string_view plan_;
  int32_t line_;
  std::vector<std::string_view> words_;
  size_t next_word_ = 0;
  std::map<std::string_view, std::string_view> values_;
};

}  // namespace glm
