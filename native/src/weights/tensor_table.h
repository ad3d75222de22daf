// The checkpoint's tensors by name, checked against their shards when they are looked up. Ranks look up at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "glm/runtime.h"
#include "weights/mapped_file.h"
#include "weights/synthetic.h"

namespace glm {

struct Tensor {
  std::string name;
  std::string shard;
  const MappedFile* file;  // NULL: synthetic
  const std::byte* data;   // in the file's mapping, aligned to the element; NULL: synthetic
  SyntheticValues synthetic;
  glm_dtype dtype;
  std::vector<int64_t> shape;
};

class TensorTable {
 public:
  explicit TensorTable(std::span<const glm_tensor_source> sources);

  // Maps the shard if need be. `wanted_by` is the plan's weight. Throws GLM_BAD_CHECKPOINT.
  Tensor find(const std::string& name, const std::string& wanted_by);

 private:
  const MappedFile& shard(const std::string& path);

  std::map<std::string_view, const glm_tensor_source*> sources_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<MappedFile>, std::less<>> shards_;  // guarded by mutex_
};

}  // namespace glm
