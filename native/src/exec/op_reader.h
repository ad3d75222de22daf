// Reads the arguments of one op line: resolves names, checks dtype and shape, and refuses aliases.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "memory/state.h"
#include "plan/op_form.h"
#include "plan/plan.h"
#include "support/error.h"
#include "weights/weights.h"

namespace glm {

// What plans are bound to. Outlives the bound ops.
struct Resources {
  glm_dtype act;
  Limits limits;
  State state;
  Weights weights;
};

// Which rows of a step an op is called for: all, those sampled, or those that the rank has to itself.
enum class OpRows { kTokens, kSamples, kOwn };

class OpReader {
 public:
  static constexpr int32_t kAnyCols = 0;

  OpReader(const Resources& resources, const Plan& plan, const OpSpec& op);

  const Resources& resources() const { return resources_; }
  bool has(std::string_view key) const { return op_.values.contains(key); }
  OpRows rows() const { return rows_; }

  template <class... Parts>
  [[noreturn]] void error(std::string_view key, const Parts&... parts) const {
    fail(GLM_INVALID_ARGUMENT, plan_.name, " plan, line ", op_.line.number, ": op ", op_form(op_.kind).name, " ",
         op_.label, ": ", key, ": ", parts...);
  }

  // A buffer with room for `rows_each` rows per row of the op. `cols` kAnyCols: as the buffer has. Absent keys give
  // data NULL, where the plan's grammar lets them be absent.
  glm_tensor read(std::string_view key, glm_dtype dtype, int32_t cols, int32_t rows_each = 1);
  glm_tensor write(std::string_view key, glm_dtype dtype, int32_t cols, int32_t rows_each = 1);
  glm_tensor read_act(std::string_view key, int32_t cols, int32_t rows_each = 1);
  glm_tensor write_act(std::string_view key, int32_t cols, int32_t rows_each = 1);
  glm_tensor write_any(std::string_view key);      // of any dtype and columns
  glm_tensor read_all_rows(std::string_view key);  // act, a row for each T, though the op has S
  bool has_buffer(std::string_view key, glm_dtype dtype) const { return buffer(key).tensor.dtype == dtype; }
  // At least `count` i32, whatever rows and columns they are declared as.
  const int32_t* read_ints(std::string_view key, int64_t count);
  int32_t* write_ints(std::string_view key, int64_t count);

  const float* vector(std::string_view key, int32_t size) const;  // NULL where absent
  const Matrix& matrix(std::string_view key, int32_t cols) const;
  const Matrix& whole_matrix(std::string_view key, int32_t cols) const;  // one part, no bias, not FP8
  const glm_expert_weights& experts(std::string_view key) const;
  const int32_t* places(std::string_view key, int32_t count) const;  // NULL where absent
  uint64_t* expert_loads(int32_t count) const;                       // of the op's label
  const Rope& rope(std::string_view key) const;
  glm_kv_layer kv_layer(std::string_view key) const;

  int32_t integer(std::string_view key, int32_t low, int32_t high) const;
  float positive(std::string_view key) const;
  float non_negative(std::string_view key) const;

  int32_t max_rows() const;  // of the op

  // No buffer is written twice, nor read and written. `in_place` is an output that may also be the input of that key.
  void check_aliases(std::string_view in_place = {}, std::string_view input = {}) const;

 private:
  struct Use {
    std::string_view key;
    const void* data;
  };

  OpRows read_rows() const;
  std::string_view value(std::string_view key) const;
  const Buffer& buffer(std::string_view key) const;
  glm_tensor tensor(std::string_view key, glm_dtype dtype, int32_t cols, int32_t rows_each) const;
  int32_t* ints(std::string_view key, int64_t count) const;
  float number(std::string_view key) const;

  template <class Map>
  const typename Map::mapped_type& named(std::string_view key, const Map& map, std::string_view what) const;

  const Resources& resources_;
  const Plan& plan_;
  const OpSpec& op_;
  OpRows rows_;
  std::vector<Use> reads_;
  std::vector<Use> writes_;
};

}  // namespace glm
