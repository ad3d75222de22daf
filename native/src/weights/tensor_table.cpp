#include "weights/tensor_table.h"

#include <cmath>

#include "support/dtype.h"
#include "support/error.h"

namespace glm {
namespace {

std::string file_name(const glm_tensor_source& source) {
  return source.path == nullptr ? "no file" : source.path;
}

glm_dtype parse_dtype(const glm_tensor_source& source) {
  static constexpr std::pair<std::string_view, glm_dtype> known[] = {
      {"F32", GLM_F32}, {"BF16", GLM_BF16}, {"F16", GLM_F16}, {"F8_E4M3", GLM_FP8_E4M3}};
  for (const auto& [name, dtype] : known) {
    if (name == source.dtype) return dtype;
  }
  fail(GLM_BAD_CHECKPOINT, "tensor ", source.name, " in ", file_name(source), ": dtype ", source.dtype,
       ", expected one of F32, BF16, F16, F8_E4M3");
}

void check_bytes(const glm_tensor_source& source, glm_dtype dtype) {
  if (source.rank < 0 || source.rank > GLM_MAX_DIMS) {
    fail(GLM_BAD_CHECKPOINT, "tensor ", source.name, " in ", file_name(source), ": rank ", source.rank,
         ", expected 0 to ", GLM_MAX_DIMS);
  }
  uint64_t bytes = element_bytes(dtype);
  bool overflow = false;
  for (int32_t i = 0; i < source.rank; ++i) {
    overflow |= source.shape[i] < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(source.shape[i]), &bytes);
  }
  if (overflow || bytes != source.bytes) {
    fail(GLM_BAD_CHECKPOINT, "tensor ", source.name, " in ", file_name(source), ": ", source.bytes,
         " bytes, expected what shape and dtype ", source.dtype,
         " make: ", overflow ? std::string("more than 64 bits hold") : text(bytes));
  }
}

void check_synthetic(const glm_tensor_source& source, glm_dtype dtype) {
  if (dtype == GLM_F16) {
    fail(GLM_UNSUPPORTED, "tensor ", source.name, ": dtype F16 without a file, expected F32, BF16 or F8_E4M3");
  }
  if (!std::isfinite(source.mean) || !std::isfinite(source.spread)) {
    fail(GLM_INVALID_ARGUMENT, "tensor ", source.name, ": mean ", source.mean, " and spread ", source.spread,
         ", expected finite values");
  }
}

}  // namespace

TensorTable::TensorTable(std::span<const glm_tensor_source> sources) {
  for (const glm_tensor_source& source : sources) {
    if (source.name == nullptr || source.dtype == nullptr) {
      fail(GLM_INVALID_ARGUMENT, "tensors[", &source - sources.data(), "]: name or dtype is NULL");
    }
    if (!sources_.emplace(source.name, &source).second) {
      fail(GLM_BAD_CHECKPOINT, "tensor ", source.name, " is listed twice");
    }
  }
}

const MappedFile& TensorTable::shard(const std::string& path) {
  const std::lock_guard lock(mutex_);
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
  Tensor tensor{.name = name,
                .shard = file_name(source),
                .file = nullptr,
                .data = nullptr,
                .synthetic = {source.seed, source.mean, source.spread},
                .dtype = dtype,
                .shape = std::vector<int64_t>(source.shape, source.shape + source.rank)};
  if (source.path == nullptr) {
    check_synthetic(source, dtype);
    return tensor;
  }
  const MappedFile& file = shard(source.path);
  if (source.bytes > file.size() || source.offset > file.size() - source.bytes) {
    fail(GLM_BAD_CHECKPOINT, "tensor ", name, " in ", source.path, ": bytes ", source.offset, " to ",
         source.offset + source.bytes, ", but the file has ", file.size());
  }
  if (source.offset % element_bytes(dtype) != 0) {
    fail(GLM_BAD_CHECKPOINT, "tensor ", name, " in ", source.path, ": offset ", source.offset,
         " is not a multiple of its ", element_bytes(dtype), "-byte element");
  }
  tensor.file = &file;
  tensor.data = file.data() + source.offset;
  return tensor;
}

}  // namespace glm
