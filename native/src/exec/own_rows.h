// Ops with rows=O run on the rows that a rank has to itself: their args are those of the whole step, moved on.
#pragma once

#include <cstdint>

#include "glm/kernels.h"
#include "support/dtype.h"

namespace glm {

// A rank among those of its engine.
struct RankPlace {
  int32_t rank = 0;
  int32_t num_ranks = 1;

  // First of the rows that it has to itself, of `rows`; where the next rank's begin.
  int32_t first_row(int32_t rows) const { return row_of(rows, rank); }
  int32_t end_row(int32_t rows) const { return row_of(rows, rank + 1); }

 private:
  int32_t row_of(int32_t rows, int32_t index) const { return static_cast<int32_t>(int64_t{rows} * index / num_ranks); }
};

template <class... Tensors>
void move_on(int32_t rows, Tensors&... tensors) {
  const auto move = [rows](glm_tensor& tensor) {
    if (tensor.data == nullptr) return;
    tensor.data = static_cast<std::byte*>(tensor.data) +
                  int64_t{rows} * tensor.stride * static_cast<int64_t>(element_bytes(tensor.dtype));
  };
  (move(tensors), ...);
}

inline void skip_rows(glm_rms_norm_args& args, int32_t rows) {
  move_on(rows, args.residual, args.delta, args.out, args.q, args.scale);
}
inline void skip_rows(glm_linear_args& args, int32_t rows) {
  move_on(rows, args.x, args.x_scale, args.out);
}
inline void skip_rows(glm_silu_mul_args& args, int32_t rows) {
  move_on(rows, args.x, args.out, args.q, args.scale);
}
inline void skip_rows(glm_moe_route_args& args, int32_t rows) {
  move_on(rows, args.x, args.ids, args.weights);
}

template <class Args>
concept TakesOwnRows = requires(Args& args) { skip_rows(args, 0); };

}  // namespace glm
