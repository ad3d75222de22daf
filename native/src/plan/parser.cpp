#include <algorithm>
#include <set>

#include "plan/fields.h"
#include "plan/op_form.h"
#include "plan/plan.h"
#include "support/dtype.h"

namespace glm {
namespace {

constexpr std::pair<std::string_view, glm_dtype> kActDtypes[] = {{"f32", GLM_F32}, {"bf16", GLM_BF16}};
constexpr std::pair<std::string_view, glm_dtype> kKvDtypes[] = {
    {"bf16", GLM_BF16}, {"f32", GLM_F32}, {"fp8", GLM_FP8_E4M3}};
constexpr std::pair<std::string_view, glm_dtype> kBufferDtypes[] = {
    {"f32", GLM_F32}, {"bf16", GLM_BF16}, {"fp8", GLM_FP8_E4M3}, {"i32", GLM_I32}};
constexpr std::pair<std::string_view, glm_weight_format> kFormats[] = {{"f32", GLM_W_F32},
                                                                       {"bf16", GLM_W_BF16},
                                                                       {"f16", GLM_W_F16},
                                                                       {"fp8_channel", GLM_W_FP8_CHANNEL},
                                                                       {"fp8_block", GLM_W_FP8_BLOCK}};

class Parser {
 public:
  explicit Parser(std::string_view expected) : expected_(expected) {}

  Plan parse(std::string_view text) {
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      ++line_;
      const std::string_view line = text.substr(begin, end - begin);
      begin = end + 1;
      if (line_ > 1 && line.starts_with('#')) continue;
      Fields fields(expected_, line_, line);
      if (line_ == 1) {
        header(fields);
      } else {
        record(fields);
      }
    }
    Fields end(expected_, line_ + 1, "end");
    if (line_ == 0) end.error("the text is empty, expected 'glmplan 1'");
    complete_matrix(end);
    for (const char* kind : {"name", "act", "vocab"}) {
      if (!seen_.contains(std::pair(kind, std::string()))) end.error("expected a record '", kind, "' before the end");
    }
    return std::move(plan_);
  }

 private:
  void header(Fields& fields) {
    if (fields.word("glmplan") != "glmplan" || fields.word("1") != "1") fields.error("expected 'glmplan 1'");
    fields.finish();
  }

  void record(Fields& fields) {
    using Reader = void (Parser::*)(Fields&);
    static constexpr std::pair<std::string_view, Reader> readers[] = {
        {"name", &Parser::name},          {"meta", &Parser::meta},       {"act", &Parser::act},
        {"vocab", &Parser::vocab},        {"kv", &Parser::kv},           {"rope", &Parser::rope},
        {"buffer", &Parser::buffer},      {"vector", &Parser::vector},   {"matrix", &Parser::matrix},
        {"part", &Parser::part},          {"experts", &Parser::experts}, {"op", &Parser::op},
        {"placement", &Parser::placement}};
    const std::string_view kind = fields.word("a record");
    const Reader reader = fields.choose("record", kind, readers);
    if (kind != "part") complete_matrix(fields);
    (this->*reader)(fields);
    fields.finish();
  }

  // Refuses the second record of a kind (and name).
  void once(const Fields& fields, const char* kind, const std::string& name = {}) {
    if (!seen_.emplace(kind, name).second) fields.error(kind, name.empty() ? "" : " ", name, " is given twice");
  }

  void name(Fields& fields) {
    once(fields, "name");
    plan_.name = fields.name("name");
    if (plan_.name != expected_) fields.error("name '", plan_.name, "', expected ", expected_);
  }

  void meta(Fields& fields) {
    for (auto& [key, value] : fields.take_all()) plan_.meta.emplace_back(key, value);
  }

  void act(Fields& fields) {
    once(fields, "act");
    plan_.declarations.act = fields.choose("act", fields.word("act"), kActDtypes);
  }

  void vocab(Fields& fields) {
    once(fields, "vocab");
    plan_.declarations.vocab = fields.size("vocab");
  }

  void kv(Fields& fields) {
    once(fields, "kv");
    plan_.declarations.kv = KvSpec{.line = fields.line(),
                                   .layers = fields.size_value("layers"),
                                   .kv_heads = fields.size_value("kv_heads"),
                                   .head_dim = fields.size_value("head_dim"),
                                   .dtype = fields.choose("dtype", fields.value("dtype"), kKvDtypes)};
  }

  void rope(Fields& fields) {
    RopeSpec spec{
        .line = fields.line(), .name = fields.name("rope name"), .rotary_dim = fields.size_value("rotary_dim")};
    once(fields, "rope", spec.name);
    if (spec.rotary_dim % 2 != 0) fields.error("rotary_dim ", spec.rotary_dim, ", expected an even number");
    const std::string_view text = fields.value("theta");
    const auto theta = parse_float(text);
    if (!theta || !(*theta > 0)) fields.error("theta '", text, "', expected a number above 0");
    spec.theta = *theta;
    plan_.declarations.ropes.push_back(std::move(spec));
  }

  void buffer(Fields& fields) {
    BufferSpec spec{.line = fields.line(), .name = fields.name("buffer name")};
    once(fields, "buffer", spec.name);
    spec.dtype = fields.choose("dtype", fields.word("dtype"), kBufferDtypes);
    spec.rows = row_count(fields, fields.word("rows"));
    spec.cols = fields.size("cols");
    plan_.declarations.buffers.push_back(std::move(spec));
  }

  static RowCount row_count(const Fields& fields, std::string_view text) {
    if (text == "T") return {RowUnit::kRows, 1};
    if (text == "S") return {RowUnit::kSamples, 1};
    if (text.ends_with("*T")) return {RowUnit::kRows, fields.to_size("rows", text.substr(0, text.size() - 2))};
    return {RowUnit::kConstant, fields.to_size("rows", text)};
  }

  void vector(Fields& fields) {
    VectorSpec spec{.line = fields.line(), .name = fields.name("vector name"), .size = fields.size("size")};
    once(fields, "vector", spec.name);
    spec.tensor = fields.value("tensor");
    const auto rows = fields.take("rows");
    spec.rows = rows ? fields.to_range("rows", *rows) : Range{0, spec.size};
    if (spec.rows.size() != spec.size) fields.error("rows '", *rows, "', expected a range of ", spec.size);
    plan_.declarations.vectors.push_back(std::move(spec));
  }

  void matrix(Fields& fields) {
    MatrixSpec spec{.line = fields.line(), .name = fields.name("matrix name")};
    once(fields, "matrix", spec.name);
    spec.format = fields.choose("format", fields.word("format"), kFormats);
    spec.rows = fields.size("output channels");
    spec.cols = fields.size("input channels");
    plan_.declarations.matrices.push_back(std::move(spec));
    open_matrix_ = true;
  }

  void part(Fields& fields) {
    if (!open_matrix_) fields.error("part without a matrix before it");
    MatrixSpec& matrix = plan_.declarations.matrices.back();
    if (matrix.parts.size() == GLM_MAX_PARTS) {
      fields.error("matrix ", matrix.name, " has more than ", GLM_MAX_PARTS, " parts");
    }
    matrix.parts.push_back(slice(fields, matrix.format, matrix.cols));
    if (const auto bias = fields.take("bias")) matrix.parts.back().bias = *bias;
  }

  static PartSpec slice(Fields& fields, glm_weight_format format, int32_t cols) {
    PartSpec part{.line = fields.line(),
                  .tensor = std::string(fields.value("tensor")),
                  .rows = fields.to_range("rows", fields.value("rows")),
                  .cols = fields.to_range("cols", fields.value("cols"))};
    if (part.cols.size() != cols) fields.error("cols: a range of ", part.cols.size(), ", expected ", cols);
    if (format == GLM_W_FP8_BLOCK && (part.rows.begin % GLM_FP8_BLOCK != 0 || part.cols.begin % GLM_FP8_BLOCK != 0)) {
      fields.error("rows and cols of an fp8_block weight must begin on a multiple of ", GLM_FP8_BLOCK);
    }
    const auto scale = fields.take("scale");
    if (scale.has_value() != is_fp8(format)) {
      fields.error(is_fp8(format) ? "expected scale=... for format " : "scale=... does not belong to format ",
                   format_name(format));
    }
    if (scale) part.scale = *scale;
    return part;
  }

  // A matrix ends where the next record begins.
  void complete_matrix(const Fields& fields) {
    if (!open_matrix_) return;
    open_matrix_ = false;
    const MatrixSpec& matrix = plan_.declarations.matrices.back();
    int64_t rows = 0;
    for (const PartSpec& part : matrix.parts) rows += part.rows.size();
    if (rows != matrix.rows) {
      fields.error("the parts of matrix ", matrix.name, " have ", rows, " rows, expected ", matrix.rows);
    }
  }

  void placement(Fields& fields) {
    PlacementSpec spec{.line = fields.line(), .name = fields.name("placement name")};
    once(fields, "placement", spec.name);
    const int32_t count = fields.size("count");
    spec.experts = fields.to_permutation("experts", fields.value("experts"), count);
    plan_.declarations.placements.push_back(std::move(spec));
  }

  // Throws if there is none of that name for `count` experts.
  void check_placement(const Fields& fields, const std::string& name, int32_t count) const {
    const auto& placements = plan_.declarations.placements;
    const auto found = std::ranges::find(placements, name, &PlacementSpec::name);
    if (found == placements.end()) fields.error("placement '", name, "', expected one that is declared before");
    const auto placed = static_cast<int32_t>(found->experts.size());
    if (count > placed) fields.error("placement ", name, ": of ", placed, " experts, expected at least ", count);
  }

  void experts(Fields& fields) {
    ExpertsSpec spec{.line = fields.line(), .name = fields.name("experts name")};
    once(fields, "experts", spec.name);
    spec.format = fields.choose("format", fields.word("format"), kFormats);
    spec.count = fields.size("count");
    spec.rows = fields.size("output channels");
    spec.cols = fields.size("input channels");
    const std::string_view first = fields.value("first");
    const auto parsed = parse_int32(first);
    if (!parsed || *parsed < 0 || *parsed > INT32_MAX - spec.count) {
      fields.error("first '", first, "', expected an integer from 0 to ", INT32_MAX - spec.count);
    }
    spec.first = *parsed;
    spec.part = slice(fields, spec.format, spec.cols);
    if (spec.part.rows.size() != spec.rows) {
      fields.error("rows: a range of ", spec.part.rows.size(), ", expected ", spec.rows);
    }
    if (const auto placement = fields.take("placement")) {
      spec.placement = *placement;
      check_placement(fields, spec.placement, spec.first + spec.count);
    }
    for (const std::string& tensor : {spec.part.tensor, spec.part.scale}) {
      if (!tensor.empty() && tensor.find("{e}") == std::string::npos) {
        fields.error("tensor '", tensor, "', expected {e} where the expert's id goes");
      }
    }
    plan_.declarations.experts.push_back(std::move(spec));
  }

  void op(Fields& fields) {
    OpSpec op{.line = fields.line()};
    const std::string_view name = fields.word("op kind");
    const auto kind = find_op(name);
    if (!kind) fields.error("unknown op '", name, "'");
    op.kind = *kind;
    op.label = fields.name("label");
    op.values = fields.take_all();
    const OpForm& form = op_form(op.kind);
    for (const std::string_view key : form.required) {
      if (!op.values.contains(key)) fields.error("op ", name, " ", op.label, ": expected ", key, "=...");
    }
    for (const auto& [key, value] : op.values) {
      const auto has = [&key = key](const auto& keys) {
        return std::find(keys.begin(), keys.end(), key) != keys.end();
      };
      if (!has(form.required) && !has(form.optional))
        fields.error("op ", name, " ", op.label, ": unknown key '", key, "'");
    }
    check_same_placement(fields, op);
    plan_.ops.push_back(std::move(op));
  }

  // Experts lie as the moe_route before them numbers them.
  void check_same_placement(const Fields& fields, const OpSpec& op) {
    if (op.kind == GLM_OP_MOE_ROUTE) {
      const auto found = op.values.find("placement");
      route_placement_ = found == op.values.end() ? "" : found->second;
    }
    for (const std::string_view key : {"gate", "up", "down"}) {
      const auto named = op.values.find(key);
      if (named == op.values.end()) continue;
      const auto spec = std::ranges::find(plan_.declarations.experts, named->second, &ExpertsSpec::name);
      if (spec == plan_.declarations.experts.end() || spec->placement == route_placement_) continue;
      fields.error("op ", op_form(op.kind).name, " ", op.label, ": ", key, ": experts ", spec->name,
                   " have placement '", spec->placement, "', the moe_route before has '", route_placement_, "'");
    }
  }

  std::string_view expected_;
  int32_t line_ = 0;
  Plan plan_;
  bool open_matrix_ = false;
  std::string route_placement_;
  std::set<std::pair<std::string, std::string>> seen_;
};

}  // namespace

Plan parse_plan(std::string_view text, std::string_view expected) {
  return Parser(expected).parse(text);
}

}  // namespace glm
