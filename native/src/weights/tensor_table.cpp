#include "weights/tensor_table.h"

#include "support/dtype.h"
#include "support/error.h"

namespace glm {
namespace {

glm_dtype parse_dtype(const glm_tensor_source& source) {
  static constexpr std::pair<std::string_view, glm_dtype> known[] = {
      {"F32", GLM_F32}, {"BF16", GLM_BF16}, {"F16", GLM_F16}, {"F8_E4M3", GLM_FP8_E4M3}};
  for (const auto& [name, dtype] : known) {
    if (name == source.dtype) return dtype;
  }
  fail(GLM_BAD_CHECKPOINT, "tensor ", source.name, " in ", source.path, ": dtype ", source.dtype,
       ", expected one of F32, BF16, F16, F8_E4M3");
}

void check_bytes(const glm_tensor_source& source, glm_dtype dtype) {
  if (source.rank < 0 || source.rank > GLM_MAX_RANK) {
    fail(GLM_BAD_CHECKPOINT, "tensor ", source.name, " in ", source.path, ": rank ", source.rank, ", expected 0 to ",
         GLM_MAX_RANK);
  }
  uint64_t bytes = element_bytes(dtype);
  bool overflow = false;
  for (int32_t i = 0; i < source.rank; ++i) {
    overflow |= source.shape[i] < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(source.shape[i]), &bytes);
  }
  if (overflow || bytes != source.bytes) {
    fail(GLM_BAD_CHECKPOINT, "tensor ", source.name, " in ", source.path, ": ", source.bytes,
         " bytes, expected what shape and dtype ", source.dtype,
         " make: ", overflow ? std::string("more than 64 bits hold") : text(bytes));
  }
}

}  // namespace

TensorTable::TensorTable(std::span<const glm_tensor_source> sources) {
  for (const glm_tensor_source& source : sources) {
    if (source.name == nullptr || source.path == nullptr || source.dtype == nullptr) {
      fail(GLM_INVALID_ARGUMENT, "tensors[", &source - sources.data(), "]: name, path or dtype is NULL");
    }
    if (!sources_.emplace(source.name, &source).second) {
      fail(GLM_BAD_CHECKPOINT, "tensor ", source.name, " is listed twice");
    }
  }
}

const MappedFile& TensorTable::shard(const std::string& path) {
  auto& file = shards_[path];
  if (!file) file = std::make_unique<MappedFile>(path);
  return *file;
}

Tensor TensorTable::find(const std::string& name, const std::string& wanted_by) {
  const auto found = sources_.find(name);
  if (found == sources_.end()) {
    fail(GLM_BAD_CHECKPOINT, "tensor ", name, ": not in the checkpoint, but ", wanted_by, " needs it");
  }
  const glm_tensor_source& source = *found->second;
  const glm_dtype dtype = parse_dtype(source);
  check_bytes(source, dtype);
  const MappedFile& file = shard(source.path);
  if (source.bytes > file.size() || source.offset > file.size() - source.bytes) {
    fail(GLM_BAD_CHECKPOINT, "tensor ", name, " in ", source.path, ": bytes ", source.offset, " to ",
         source.offset + source.bytes, ", but the file has ", file.size());
  }
  if (source.offset % element_bytes(dtype) != 0) {
    fail(GLM_BAD_CHECKPOINT, "tensor ", name, " in ", source.path, ": offset ", source.offset,
         " is not a multiple of its ", element_bytes(dtype), "-byte element");
  }
  return Tensor{.name = name,
                .shard = source.path,
                .data = file.data() + source.offset,
                .dtype = dtype,
                .shape = std::vector<int64_t>(source.shape, source.shape + source.rank)};
}

}  // namespace glm
