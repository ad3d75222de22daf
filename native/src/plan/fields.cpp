#include "plan/fields.h"

#include <algorithm>
#include <charconv>

namespace glm {
namespace {

template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool is_name(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  });
}

}  // namespace

std::optional<int32_t> parse_int32(std::string_view text) {
  return parse_number<int32_t>(text);
}
std::optional<float> parse_float(std::string_view text) {
  return parse_number<float>(text);
}

Fields::Fields(std::string_view plan, int32_t line, std::string_view text) : plan_(plan), line_(line) {
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    add(text.substr(begin, end - begin));
    begin = end + 1;
  }
}

void Fields::add(std::string_view field) {
  if (field.empty()) error("expected fields separated by one space, with none before or after");
  const size_t equals = field.find('=');
  if (equals == std::string_view::npos) {
    if (!values_.empty()) error("word '", field, "' after key=value pairs");
    words_.push_back(field);
    return;
  }
  const auto [key, value] = std::pair(field.substr(0, equals), field.substr(equals + 1));
  if (key.empty() || value.empty()) error("'", field, "', expected key=value");
  if (!values_.emplace(key, value).second) error("key '", key, "' is given twice");
}

std::string_view Fields::word(std::string_view what) {
  if (next_word_ == words_.size()) error("expected ", what, " at the end of the words");
  return words_[next_word_++];
}

std::string Fields::name(std::string_view what) {
  const std::string_view text = word(what);
  if (!is_name(text)) error(what, " '", text, "', expected letters, digits, '.', '_' or '-'");
  return std::string(text);
}

int32_t Fields::size(std::string_view what) {
  return to_size(what, word(what));
}

std::optional<std::string_view> Fields::take(std::string_view key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  const std::string_view value = found->second;
  values_.erase(found);
  return value;
}

std::string_view Fields::value(std::string_view key) {
  const auto found = take(key);
  if (!found) error("expected ", key, "=...");
  return *found;
}

int32_t Fields::size_value(std::string_view key) {
  return to_size(key, value(key));
}

std::map<std::string, std::string, std::less<>> Fields::take_all() {
  std::map<std::string, std::string, std::less<>> all(values_.begin(), values_.end());
  values_.clear();
  return all;
}

void Fields::finish() const {
  if (next_word_ != words_.size()) error("unexpected word '", words_[next_word_], "'");
  if (!values_.empty()) error("unknown key '", values_.begin()->first, "'");
}

int32_t Fields::to_size(std::string_view what, std::string_view text) const {
  const auto value = parse_int32(text);
  if (!value || *value < 1) error(what, " '", text, "', expected an integer from 1 to 2147483647");
  return *value;
}

std::vector<int32_t> Fields::to_permutation(std::string_view what, std::string_view text, int32_t count) const {
  std::vector<int32_t> numbers;
  std::vector<bool> seen(static_cast<size_t>(count));
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const auto number = parse_int32(text.substr(begin, end - begin));
    if (!number || *number < 0 || *number >= count || seen[static_cast<size_t>(*number)]) {
      error(what, " '", text.substr(begin, end - begin), "', expected each of 0 to ", count - 1, " once");
    }
    seen[static_cast<size_t>(*number)] = true;
    numbers.push_back(*number);
    begin = end + 1;
  }
  if (numbers.size() != seen.size()) error(what, ": ", numbers.size(), " numbers, expected ", count);
  return numbers;
}

Range Fields::to_range(std::string_view what, std::string_view text) const {
  const size_t colon = std::min(text.find(':'), text.size());
  const auto begin = parse_int32(text.substr(0, colon));
  const auto end = colon < text.size() ? parse_int32(text.substr(colon + 1)) : std::nullopt;
  if (!begin || !end || *begin < 0 || *end <= *begin) error(what, " '", text, "', expected A:B with 0 <= A < B");
  return Range{*begin, *end};
}

}  // namespace glm
