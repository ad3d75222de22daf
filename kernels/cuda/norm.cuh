/* What follows the sum of squares in every RMS norm. */
#ifndef GLM_CUDA_NORM_CUH
#define GLM_CUDA_NORM_CUH

#include "row.cuh"
#include "whole_row.cuh"

namespace glm::cuda {

/* The norm's weights; those of the thread's first pack are read here, before the kernel's predecessor ends. */
class NormWeights {
 public:
  __device__ __forceinline__ NormWeights(const float* weight, int32_t cols)
      : weight_(weight), cols_(cols), own_(static_cast<int32_t>(threadIdx.x) * kPack) {
    load_pack(weight, min(own_, cols), cols, values_);
  }

  /* Writes row `index`: `row` times its inverse RMS and the weights. `largest`: one word a warp. */
  template <typename Act>
  __device__ __forceinline__ void store_normalized(BlockRow& row, float inverse_rms, const RowTargets& targets,
                                                   int64_t index, uint32_t* largest) {
    store_row<Act>(row, cols_, targets, index, largest, [&](int32_t first, float* values) {
      if (first != own_) load_pack(weight_, first, cols_, values_);
      row.read(first, values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] *= inverse_rms;
      round_pack<Act>(values);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] *= values_[i];
      round_pack<Act>(values);
    });
  }

 private:
  const float* weight_;
  int32_t cols_;
  int32_t own_;
  float values_[kPack];
};

/* Of this thread's sum of squares, over the block. `sums`: one word a warp. */
__device__ __forceinline__ float inverse_rms(float squares, int32_t cols, float eps, float* sums) {
  return 1.0f / sqrtf(block_sum(squares, sums) / static_cast<float>(cols) + eps);
}

/* Times the inverse RMS, rounded, times the weights, rounded. */
__device__ __forceinline__ Packed normalized(const Packed& pack, float inverse_rms, const float weights[kPack]) {
  Packed out;
#pragma unroll
  for (int i = 0; i < kPack / 2; ++i) {
    const uint32_t word = pack.words[i];
    const uint32_t scaled = rounded_pair(low_of(word) * inverse_rms, high_of(word) * inverse_rms);
    out.words[i] = rounded_pair(low_of(scaled) * weights[2 * i], high_of(scaled) * weights[2 * i + 1]);
  }
  return out;
}

/* Whether the rows of a norm are of bf16 and lie in whole packs. */
inline bool takes_whole_rows(const glm_rms_norm_args* args, const RowTargets& targets) {
  const int32_t cols = args->residual.cols;
  return args->residual.dtype == GLM_BF16 && has_whole_packs(args->residual, cols) &&
         has_whole_packs(args->delta, cols) && reinterpret_cast<uintptr_t>(args->weight) % sizeof(float4) == 0 &&
         takes_whole_rows(targets, cols);
}

}  // namespace glm::cuda

#endif
