#include "exec/op_reader.h"

#include <cmath>

#include "plan/fields.h"
#include "support/dtype.h"

namespace glm {

OpReader::OpReader(const Resources& resources, const Plan& plan, const OpSpec& op)
    : resources_(resources), plan_(plan), op_(op) {
  const bool sampled = op.kind == GLM_OP_GATHER_ROWS || op.kind == GLM_OP_SAMPLE;
  rows_ = sampled ? OpRows::kSamples : OpRows::kTokens;
  if (has("rows")) rows_ = read_rows();
}

OpRows OpReader::read_rows() const {
  const bool both = op_.kind == GLM_OP_RMS_NORM || op_.kind == GLM_OP_LINEAR;
  if (value("rows") == "O") return OpRows::kOwn;
  if (both && value("rows") == "S") return OpRows::kSamples;
  error("rows", "'", value("rows"), "', expected ", both ? "S or O" : "O");
}

int32_t OpReader::max_rows() const {
  const bool samples = rows_ == OpRows::kSamples || plan_.name == "decode";
  return samples ? resources_.limits.max_samples : resources_.limits.max_rows;
}

std::string_view OpReader::value(std::string_view key) const {
  const auto found = op_.values.find(key);
  if (found == op_.values.end()) error(key, "expected ", key, "=...");
  return found->second;
}

template <class Map>
const typename Map::mapped_type& OpReader::named(std::string_view key, const Map& map, std::string_view what) const {
  const auto found = map.find(value(key));
  if (found == map.end()) error(key, "no ", what, " is named '", value(key), "'");
  return found->second;
}

const Buffer& OpReader::buffer(std::string_view key) const {
  return named(key, resources_.state.buffers, "buffer");
}

glm_tensor OpReader::tensor(std::string_view key, glm_dtype dtype, int32_t cols, int32_t rows_each) const {
  if (!has(key)) return glm_tensor{nullptr, dtype, 0, 0}; /* an absent output still says what act is */
  const Buffer& found = buffer(key);
  const glm_tensor& tensor = found.tensor;
  if (tensor.dtype != dtype) {
    error(key, "buffer ", value(key), " is ", dtype_name(tensor.dtype), ", expected ", dtype_name(dtype));
  }
  if (cols != kAnyCols && tensor.cols != cols) {
    error(key, "buffer ", value(key), " has ", tensor.cols, " columns, expected ", cols);
  }
  const int64_t rows = int64_t{max_rows()} * rows_each;
  if (found.rows < rows) error(key, "buffer ", value(key), " has ", found.rows, " rows, expected ", rows);
  return tensor;
}

glm_tensor OpReader::read(std::string_view key, glm_dtype dtype, int32_t cols, int32_t rows_each) {
  const glm_tensor found = tensor(key, dtype, cols, rows_each);
  if (found.data != nullptr) reads_.push_back({key, found.data});
  return found;
}

glm_tensor OpReader::write(std::string_view key, glm_dtype dtype, int32_t cols, int32_t rows_each) {
  const glm_tensor found = tensor(key, dtype, cols, rows_each);
  if (found.data != nullptr) writes_.push_back({key, found.data});
  return found;
}

glm_tensor OpReader::read_act(std::string_view key, int32_t cols, int32_t rows_each) {
  return read(key, resources_.act, cols, rows_each);
}

glm_tensor OpReader::write_act(std::string_view key, int32_t cols, int32_t rows_each) {
  return write(key, resources_.act, cols, rows_each);
}

glm_tensor OpReader::write_any(std::string_view key) {
  return write(key, buffer(key).tensor.dtype, kAnyCols);
}

glm_tensor OpReader::read_all_rows(std::string_view key) {
  const glm_tensor found = read_act(key, kAnyCols);
  const int64_t rows = buffer(key).rows;
  if (rows < resources_.limits.max_rows) {
    error(key, "buffer ", value(key), " has ", rows, " rows, expected ", resources_.limits.max_rows);
  }
  return found;
}

int32_t* OpReader::ints(std::string_view key, int64_t count) const {
  const Buffer& found = buffer(key);
  if (found.tensor.dtype != GLM_I32) {
    error(key, "buffer ", value(key), " is ", dtype_name(found.tensor.dtype), ", expected i32");
  }
  const int64_t size = found.rows * found.tensor.cols;
  if (size < count) error(key, "buffer ", value(key), " has ", size, " elements, expected ", count);
  return static_cast<int32_t*>(found.tensor.data);
}

const int32_t* OpReader::read_ints(std::string_view key, int64_t count) {
  const int32_t* data = ints(key, count);
  reads_.push_back({key, data});
  return data;
}

int32_t* OpReader::write_ints(std::string_view key, int64_t count) {
  int32_t* data = ints(key, count);
  writes_.push_back({key, data});
  return data;
}

const float* OpReader::vector(std::string_view key, int32_t size) const {
  if (!has(key)) return nullptr;
  const Vector& found = named(key, resources_.weights.vectors, "vector");
  if (found.size != size) error(key, "vector ", value(key), " has ", found.size, " elements, expected ", size);
  return found.data;
}

const Matrix& OpReader::matrix(std::string_view key, int32_t cols) const {
  const Matrix& found = named(key, resources_.weights.matrices, "matrix");
  if (cols != kAnyCols && found.cols != cols)
    error(key, "matrix ", value(key), " has ", found.cols, " input channels, expected ", cols);
  return found;
}

const Matrix& OpReader::whole_matrix(std::string_view key, int32_t cols) const {
  const Matrix& found = matrix(key, cols);
  if (found.parts.size() != 1 || found.bias[0] != nullptr || is_fp8(found.format)) {
    error(key, "matrix ", value(key), " must have one part, no bias, and format f32, bf16 or f16");
  }
  return found;
}

const glm_expert_weights& OpReader::experts(std::string_view key) const {
  return named(key, resources_.weights.experts, "experts");
}

const int32_t* OpReader::places(std::string_view key, int32_t count) const {
  if (!has(key)) return nullptr;
  const auto is_named = [&](const PlacementSpec& spec) { return spec.name == value(key); };
  const auto found = std::ranges::find_if(plan_.declarations.placements, is_named);
  if (found == plan_.declarations.placements.end()) error(key, "no placement is named '", value(key), "'");
  if (std::ssize(found->experts) != count) {
    error(key, "placement ", value(key), " is of ", found->experts.size(), " experts, expected ", count);
  }
  return resources_.state.places.find(value(key))->second;
}

uint64_t* OpReader::expert_loads(int32_t count) const {
  uint64_t* found = resources_.state.expert_loads.find(op_.label, count);
  if (found == nullptr) error("count", count, ", expected as in the other plan's op of this label");
  return found;
}

const Rope& OpReader::rope(std::string_view key) const {
  return named(key, resources_.state.ropes, "rope");
}

glm_kv_layer OpReader::kv_layer(std::string_view key) const {
  const auto& layers = resources_.state.kv;
  if (layers.empty()) error(key, "the plan has no kv record");
  return layers[static_cast<size_t>(integer(key, 0, static_cast<int32_t>(layers.size()) - 1))];
}

int32_t OpReader::integer(std::string_view key, int32_t low, int32_t high) const {
  const auto parsed = parse_int32(value(key));
  if (!parsed || *parsed < low || *parsed > high) {
    error(key, "'", value(key), "', expected an integer from ", low, " to ", high);
  }
  return *parsed;
}

float OpReader::number(std::string_view key) const {
  const auto parsed = parse_float(value(key));
  if (!parsed || !std::isfinite(*parsed)) error(key, "'", value(key), "', expected a finite number");
  return *parsed;
}

float OpReader::positive(std::string_view key) const {
  const float found = number(key);
  if (!(found > 0)) error(key, "'", value(key), "', expected a number above 0");
  return found;
}

float OpReader::non_negative(std::string_view key) const {
  const float found = number(key);
  if (!(found >= 0)) error(key, "'", value(key), "', expected a number not below 0");
  return found;
}

void OpReader::check_aliases(std::string_view in_place, std::string_view input) const {
  for (size_t i = 0; i < writes_.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (writes_[i].data == writes_[j].data) error(writes_[i].key, "is the same buffer as ", writes_[j].key);
    }
    for (const Use& read : reads_) {
      const bool allowed = writes_[i].key == in_place && read.key == input;
      if (writes_[i].data == read.data && !allowed) error(writes_[i].key, "is the same buffer as ", read.key);
    }
  }
}

}  // namespace glm
