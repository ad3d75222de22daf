#include "dot.cuh"
#include "launch.h"
#include "linear.h"

namespace glm::cuda {

namespace {

template <typename X, typename W, typename Out>
__global__ void linear_scalar_kernel(const __grid_constant__ LinearParams p) {
  begin_kernel();
  const int tile = static_cast<int>(blockIdx.x);
  int part = 0;
  while (part + 1 < p.num_parts && tile >= p.tiling.first_tile[part + 1]) ++part;
  const glm_weight& weight = p.parts[part];
  const int channel = (tile - p.tiling.first_tile[part]) * kDotWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (channel >= weight.rows) return;
  const int first = static_cast<int>(blockIdx.y) * kDotTokens;
  const X* x[kDotTokens];
  for (int i = 0; i < kDotTokens; ++i) x[i] = first + i < p.rows ? row_of<X>(p.x, first + i) : nullptr;
  float sums[kDotTokens];
  warp_dots(static_cast<const W*>(weight.data) + channel * weight.stride, x, p.x.cols, sums);
  if (threadIdx.x % kWarp != 0) return;
  const float bias = p.bias[part] == nullptr ? 0.0f : p.bias[part][channel];
  for (int i = 0; i < kDotTokens && first + i < p.rows; ++i) {
    row_of<Out>(p.out, first + i)[p.tiling.first_channel[part] + channel] = from_float<Out>(sums[i] + bias);
  }
}

}  // namespace

glm_status linear_scalar(glm_device* device, const glm_linear_args& args) {
  const LinearParams p = linear_params(args, kDotWarps);
  const Grid grid{dim3(p.tiling.first_tile[args.num_parts], blocks_for(args.rows, kDotTokens)), kDotWarps * kWarp};
  return with_act(args.x.dtype, [&](auto act) {
    return with_weight(args.format, [&](auto weight) {
      return with_act(args.out.dtype, [&](auto out) {
        using X = typename decltype(act)::type;
        using W = typename decltype(weight)::type;
        using Out = typename decltype(out)::type;
        return launch(device, "linear", grid, linear_scalar_kernel<X, W, Out>, p);
      });
    });
  });
}

}  // namespace glm::cuda
