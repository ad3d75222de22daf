// The records of a plan text (native/PLAN.md), as they stand there: names are not resolved yet.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "glm/kernels.h"

namespace glm {

// Where a record stands. Two plans may say the same on different lines, so lines never make records differ.
struct PlanLine {
  int32_t number = 0;
  bool operator==(const PlanLine&) const { return true; }
};

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

enum class RowUnit { kConstant, kRows, kSamples };

// count, count * T or count * S.
struct RowCount {
  RowUnit unit = RowUnit::kConstant;
  int32_t count = 0;
  bool operator==(const RowCount&) const = default;
};

struct KvSpec {
  PlanLine line;
  int32_t layers = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  glm_dtype dtype = GLM_F32;
  bool operator==(const KvSpec&) const = default;
};

struct RopeSpec {
  PlanLine line;
  std::string name = {};
  int32_t rotary_dim = 0;
  float theta = 0;
  bool operator==(const RopeSpec&) const = default;
};

struct BufferSpec {
  PlanLine line;
  std::string name = {};
  glm_dtype dtype = GLM_F32;
  RowCount rows = {};
  int32_t cols = 0;
  bool operator==(const BufferSpec&) const = default;
};

struct VectorSpec {
  PlanLine line;
  std::string name = {};
  int32_t size = 0;
  std::string tensor = {};
  Range rows = {};
  bool operator==(const VectorSpec&) const = default;
};

struct PartSpec {
  PlanLine line;
  std::string tensor = {};
  Range rows = {};
  Range cols = {};
  std::string scale = {};  // empty: none
  std::string bias = {};   // empty: none
  bool operator==(const PartSpec&) const = default;
};

struct MatrixSpec {
  PlanLine line;
  std::string name = {};
  glm_weight_format format = GLM_W_F32;
  int32_t rows = 0;
  int32_t cols = 0;
  std::vector<PartSpec> parts = {};
  bool operator==(const MatrixSpec&) const = default;
};

// Expert experts[i] is at place i: a permutation.
struct PlacementSpec {
  PlanLine line;
  std::string name = {};
  std::vector<int32_t> experts = {};
  bool operator==(const PlacementSpec&) const = default;
};

struct ExpertsSpec {
  PlanLine line;
  std::string name = {};
  glm_weight_format format = GLM_W_F32;
  int32_t count = 0;
  int32_t rows = 0;
  int32_t cols = 0;
  int32_t first = 0;
  PartSpec part = {};          // of every expert; `{e}` in its names is the expert's id
  std::string placement = {};  // empty: experts are at the places of their ids
  bool operator==(const ExpertsSpec&) const = default;
};

struct OpSpec {
  PlanLine line;
  glm_op kind = GLM_OP_COUNT;
  std::string label = {};
  std::map<std::string, std::string, std::less<>> values = {};
};

// What a plan declares; the declarations of two plans can be joined.
struct Declarations {
  glm_dtype act = GLM_F32;
  int32_t vocab = 0;
  std::optional<KvSpec> kv;
  std::vector<RopeSpec> ropes;
  std::vector<PlacementSpec> placements;
  std::vector<BufferSpec> buffers;
  std::vector<VectorSpec> vectors;
  std::vector<MatrixSpec> matrices;
  std::vector<ExpertsSpec> experts;
};

struct Plan {
  std::string name = {};  // mixed or decode
  std::vector<std::pair<std::string, std::string>> meta;
  Declarations declarations;
  std::vector<OpSpec> ops;
};

// `expected` is the plan's name. Throws GLM_INVALID_ARGUMENT that names the line and what was expected there.
Plan parse_plan(std::string_view text, std::string_view expected);

// Ranks' plans of one kind, by rank: the same calls, and parts of the vocabulary that make it up. Throws where not.
void check_ranks(const std::vector<const Plan*>& ranks);

// All that either plan declares, each name once. Throws where the two do not agree.
Declarations join_declarations(const Plan& mixed, const Plan& decode);

}  // namespace glm
