// The plan's weights: where the checkpoint has them, or in the device's memory, if it has its own.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "memory/filler.h"
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
  std::vector<ScanRegion> regions;  // every byte that is not converted, once
  uint64_t bytes_mapped() const;
};

// Vectors, scales and biases become f32 in `arena`. All else points into the shards that `tensors` maps or, where the
// device has its own memory, has room in `arena`, the parts of a matrix and the experts of a record one after another;
// scan_weights brings it there. Throws GLM_BAD_CHECKPOINT with tensor, shard, what was expected and what is there.
Weights load_weights(const Declarations& declarations, TensorTable& tensors, Arena& arena, Filler& filler);

}  // namespace glm
