#include "weights/weights.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "support/dtype.h"
#include "support/error.h"
#include "weights/convert.h"

namespace glm {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (const int64_t size : shape) out += text(out.size() > 1 ? ", " : "", size);
  return out + "]";
}

[[noreturn]] void mismatch(const Tensor& tensor, const std::string& owner, const std::string& expected) {
  fail(GLM_BAD_CHECKPOINT, "tensor ", tensor.name, " in ", tensor.shard, ": ", dtype_name(tensor.dtype), " of shape ",
       shape_text(tensor.shape), ", but ", owner, " expects ", expected);
}

std::string for_expert(const std::string& name, int32_t id) {
  std::string out = name;
  const std::string number = std::to_string(id);
  for (size_t at = out.find("{e}"); at != std::string::npos; at = out.find("{e}", at + number.size())) {
    out.replace(at, 3, number);
  }
  return out;
}

int32_t expert_at(const Declarations& declarations, const std::string& placement, int32_t place) {
  if (placement.empty()) return place;
  return std::ranges::find(declarations.placements, placement, &PlacementSpec::name)
      ->experts[static_cast<size_t>(place)];
}

// Of all matrices and experts, tied ones once.
size_t matrix_bytes(const Declarations& declarations) {
  size_t bytes = 0;
  std::set<std::tuple<std::string, int64_t, int64_t>> seen;
  const auto add = [&](const PartSpec& part, glm_weight_format format, int32_t count) {
    if (!seen.emplace(part.tensor, part.rows.begin, part.cols.begin).second) return;
    bytes +=
        Arena::byte_count("weights", element_bytes(storage_dtype(format)), {count, part.rows.size(), part.cols.size()});
  };
  for (const MatrixSpec& spec : declarations.matrices) {
    for (const PartSpec& part : spec.parts) add(part, spec.format, 1);
  }
  for (const ExpertsSpec& spec : declarations.experts) add(spec.part, spec.format, spec.count);
  return bytes;
}

// Device memory for weights that lie one after the other; taken when the first of them needs it.
struct Room {
  std::string owner;
  int64_t rows;
  int64_t cols;
  std::byte* next = nullptr;
};

// Of a float tensor's elements, as f32.
struct Reading {
  Tensor tensor;
  int64_t rows;
  int64_t cols;
  int64_t stride;
  int64_t first;  // element
  int64_t span;   // to the last element
  Filler::Array<float> target;
};

class Loader {
 public:
  Loader(TensorTable& tensors, Arena& arena, Filler& filler) : tensors_(tensors), arena_(arena), filler_(filler) {}

  Weights load(const Declarations& declarations) {
    arena_.device().require_free("weights", matrix_bytes(declarations));
    for (const VectorSpec& spec : declarations.vectors) {
      const float* data = read_rows(spec.tensor, "vector " + spec.name, spec.rows);
      weights_.vectors.emplace(spec.name, Vector{data, spec.size});
    }
    for (const MatrixSpec& spec : declarations.matrices) add_matrix(spec);
    for (const ExpertsSpec& spec : declarations.experts) add_experts(declarations, spec);
    for (const Reading& reading : readings_) read(reading);
    return std::move(weights_);
  }

 private:
  void add_matrix(const MatrixSpec& spec) {
    const std::string owner = "matrix " + spec.name;
    Matrix matrix{.format = spec.format, .rows = spec.rows, .cols = spec.cols, .parts = {}, .bias = {}};
    Room room{owner, spec.rows, spec.cols};
    for (const PartSpec& part : spec.parts) {
      matrix.parts.push_back(place(part, spec.format, owner, room));
      matrix.bias.push_back(part.bias.empty() ? nullptr : read_rows(part.bias, owner, part.rows));
    }
    weights_.matrices.emplace(spec.name, std::move(matrix));
  }

  void add_experts(const Declarations& declarations, const ExpertsSpec& spec) {
    const std::string owner = "experts " + spec.name;
    Room room{owner, int64_t{spec.count} * spec.rows, spec.cols};
    const glm_weight* experts = filler_.make<glm_weight>(owner, {spec.count}, [&](glm_weight* out) {
      for (int32_t i = 0; i < spec.count; ++i) {
        PartSpec part = spec.part;
        const int32_t id = expert_at(declarations, spec.placement, spec.first + i);
        part.tensor = for_expert(part.tensor, id);
        part.scale = for_expert(part.scale, id);
        out[i] = place(part, spec.format, owner, room);
      }
    });
    weights_.experts.emplace(spec.name, glm_expert_weights{.experts = experts,
                                                           .format = spec.format,
                                                           .first = spec.first,
                                                           .count = spec.count,
                                                           .rows = spec.rows,
                                                           .cols = spec.cols});
  }

  glm_weight place(const PartSpec& part, glm_weight_format format, const std::string& owner, Room& room) {
    const Tensor tensor = tensors_.find(part.tensor, owner);
    const bool fits = tensor.shape.size() == 2 && part.rows.end <= tensor.shape[0] && part.cols.end <= tensor.shape[1];
    if (tensor.dtype != storage_dtype(format) || !fits) {
      mismatch(
          tensor, owner,
          text(dtype_name(storage_dtype(format)), " of at least shape [", part.rows.end, ", ", part.cols.end, "]"));
    }
    const int64_t element = static_cast<int64_t>(element_bytes(tensor.dtype));
    const int64_t first = part.rows.begin * tensor.shape[1] + part.cols.begin;
    ScanRegion region{.tensor = tensor.name,
                      .shard = tensor.shard,
                      .file = tensor.file,
                      .data = tensor.data == nullptr ? nullptr : tensor.data + first * element,
                      .synthetic = tensor.synthetic,
                      .dtype = tensor.dtype,
                      .rows = part.rows.size(),
                      .row_bytes = part.cols.size() * element,
                      .stride_bytes = tensor.shape[1] * element,
                      .first_index = first,
                      .target = nullptr};
    const std::byte* data = add_region(region, room);
    glm_weight weight{.data = data,
                      .stride = region.data != nullptr && data == region.data ? tensor.shape[1] : part.cols.size(),
                      .scale = nullptr,
                      .scale_stride = 0,
                      .rows = static_cast<int32_t>(part.rows.size())};
    if (format == GLM_W_FP8_CHANNEL) weight.scale = read_channel_scale(part, tensor, owner);
    if (format == GLM_W_FP8_BLOCK) {
      weight.scale = read_block_scale(part, tensor, owner);
      weight.scale_stride = blocks(part.cols.end) - part.cols.begin / GLM_FP8_BLOCK;
    }
    return weight;
  }

  // Where ops find it. Tied weights are named twice and lie in memory once.
  const std::byte* add_region(ScanRegion region, Room& room) {
    const auto [place, added] =
        placed_.try_emplace({region.tensor, region.first_index, region.rows, region.row_bytes}, region.data);
    if (!added) return place->second;
    if (region.data == nullptr || !arena_.device().host_memory()) {
      if (room.next == nullptr) {
        const int64_t element = region.row_bytes / room.cols;
        room.next = arena_.allocate<std::byte>(room.owner, {room.rows, room.cols, element});
      }
      place->second = region.target = room.next;
      room.next += region.rows * region.row_bytes;
    }
    weights_.regions.push_back(std::move(region));
    return place->second;
  }

  // Elements [rows) of a tensor of one dimension.
  const float* read_rows(const std::string& name, const std::string& owner, Range rows) {
    const Tensor tensor = tensors_.find(name, owner);
    if (tensor.shape.size() != 1 || rows.end > tensor.shape[0]) {
      mismatch(tensor, owner, text("a float of at least shape [", rows.end, "]"));
    }
    return read_f32(tensor, owner, rows, Range{0, 1}, 1);
  }

  // [rows] or [rows, 1], beside the weight's rows.
  const float* read_channel_scale(const PartSpec& part, const Tensor& weight, const std::string& owner) {
    const Tensor tensor = tensors_.find(part.scale, owner);
    const bool vector = tensor.shape.size() == 1 || (tensor.shape.size() == 2 && tensor.shape[1] == 1);
    if (!vector || tensor.shape[0] != weight.shape[0]) {
      mismatch(tensor, owner, text("a float of shape [", weight.shape[0], ", 1]: one scale per output channel"));
    }
    return read_f32(tensor, owner, part.rows, Range{0, 1}, 1);
  }

  const float* read_block_scale(const PartSpec& part, const Tensor& weight, const std::string& owner) {
    const Tensor tensor = tensors_.find(part.scale, owner);
    const int64_t rows = blocks(weight.shape[0]);
    const int64_t cols = blocks(weight.shape[1]);
    if (tensor.shape != std::vector<int64_t>{rows, cols}) {
      mismatch(tensor, owner,
               text("a float of shape [", rows, ", ", cols, "]: one scale per ", GLM_FP8_BLOCK, "x", GLM_FP8_BLOCK,
                    " block"));
    }
    return read_f32(tensor, owner, Range{part.rows.begin / GLM_FP8_BLOCK, blocks(part.rows.end)},
                    Range{part.cols.begin / GLM_FP8_BLOCK, blocks(part.cols.end)}, cols);
  }

  // Read once all have been named, so that a disk may bring the many small tensors at once.
  const float* read_f32(const Tensor& tensor, const std::string& owner, Range rows, Range cols, int64_t stride) {
    if (tensor.dtype == GLM_FP8_E4M3) mismatch(tensor, owner, "f32, bf16 or f16");
    const int64_t first = rows.begin * stride + cols.begin;
    const int64_t span = (rows.end - 1) * stride + cols.end - first;
    if (tensor.file != nullptr) {
      tensor.file->announce(tensor.data + byte_offset(tensor, first), byte_offset(tensor, span));
    }
    const auto target = filler_.allocate<float>("tensor " + tensor.name, {rows.size(), cols.size()});
    readings_.push_back({tensor, rows.size(), cols.size(), stride, first, span, target});
    return target.out;
  }

  static size_t byte_offset(const Tensor& tensor, int64_t elements) {
    return static_cast<size_t>(elements) * element_bytes(tensor.dtype);
  }

  void read(const Reading& reading) {
    const Tensor& tensor = reading.tensor;
    const Synthetic values(tensor.synthetic, GLM_F32);
    if (tensor.file != nullptr) {
      bytes_.resize(byte_offset(tensor, reading.span));
      tensor.file->read(tensor.data + byte_offset(tensor, reading.first), bytes_.size(), bytes_.data());
    }
    float* out = reading.target.image;
    for (int64_t row = 0; row < reading.rows; ++row, out += reading.cols) {
      const int64_t at = row * reading.stride;
      if (tensor.file == nullptr) {
        values.write(reading.first + at, reading.cols, reinterpret_cast<std::byte*>(out));
      } else {
        convert_to_f32(bytes_.data() + byte_offset(tensor, at), tensor.dtype, reading.cols, out);
      }
      check_finite(tensor, out, reading.cols, reading.first + at);
    }
    filler_.send(reading.target);
  }

  static void check_finite(const Tensor& tensor, const float* values, int64_t count, int64_t first) {
    for (int64_t i = 0; i < count; ++i) {
      if (!std::isfinite(values[i])) {
        fail(GLM_BAD_CHECKPOINT, "tensor ", tensor.name, " in ", tensor.shard, ": ", values[i], " at index ", first + i,
             ", expected finite values");
      }
    }
  }

  TensorTable& tensors_;
  Arena& arena_;
  Filler& filler_;
  Weights weights_;
  std::vector<Reading> readings_;
  std::vector<std::byte> bytes_;  // of the tensor that is read
  // Tensor, first element, rows and bytes of a row -> place.
  std::map<std::tuple<std::string, int64_t, int64_t, int64_t>, const std::byte*> placed_;
};

}  // namespace

uint64_t Weights::bytes_mapped() const {
  uint64_t bytes = 0;
  for (const ScanRegion& region : regions) {
    if (region.target == nullptr) bytes += static_cast<uint64_t>(region.rows * region.row_bytes);
  }
  return bytes;
}

Weights load_weights(const Declarations& declarations, TensorTable& tensors, Arena& arena, Filler& filler) {
  return Loader(tensors, arena, filler).load(declarations);
}

}  // namespace glm
