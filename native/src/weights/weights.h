// The plan's weights, where the checkpoint has them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "plan/plan.h"
#include "weights/scan.h"
#include "weights/tensor_table.h"

namespace glm {

struct Vector {
  const float* data;
  int32_t size;
};

struct Matrix {
  glm_weight_format format;
  int32_t rows;
  int32_t cols;
  std::vector<glm_weight> parts;
  std::vector<const float*> bias;  // beside each part; NULL: none
};

struct Weights {
  std::map<std::string, Vector, std::less<>> vectors;
  std::map<std::string, Matrix, std::less<>> matrices;
  std::map<std::string, glm_expert_weights, std::less<>> experts;
  std::vector<ScanRegion> regions;  // every byte that is used in place, once
  uint64_t bytes_mapped() const;
};

// Vectors, scales and biases become f32 in `arena`; all else points into the shards that `tensors` maps.
// Throws GLM_BAD_CHECKPOINT with tensor, shard, what was expected and what is there.
Weights load_weights(const Declarations& declarations, TensorTable& tensors, Arena& arena);

}  // namespace glm
