/* Element types, their conversions, and rows of tensors. */
#ifndef GLM_CUDA_NUMERIC_CUH
#define GLM_CUDA_NUMERIC_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "glm/kernels.h"

namespace glm::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

struct fp8 {
  uint8_t code;
};

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(bf16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(f16 x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_float(fp8 x) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(x.code, __NV_E4M3);
  return __half2float(half);
}

/* Rounds to nearest even; FP8 saturates finite and infinite values, and keeps the sign of a NaN. */
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ fp8 from_float<fp8>(float x) {
  const uint8_t sign = static_cast<uint8_t>((__float_as_uint(x) >> 24) & 0x80u);
  const uint8_t code = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  return fp8{isnan(x) ? static_cast<uint8_t>(0x7fu | sign) : code};
}

/* x as it reads back after a store to T. */
template <typename T>
__device__ __forceinline__ float rounded_to(float x) {
  return to_float(from_float<T>(x));
}

template <typename T>
__device__ __forceinline__ T* row_of(const glm_tensor& tensor, int64_t row) {
  return static_cast<T*>(tensor.data) + row * tensor.stride;
}

__device__ __forceinline__ float silu(float x) {
  return x / (1.0f + expf(-x));
}

template <typename T>
struct Type {
  using type = T;
};

/* Calls f with the Type of an activation dtype, which is f32 or bf16. */
template <typename F>
auto with_act(glm_dtype dtype, F&& f) {
  return dtype == GLM_BF16 ? f(Type<bf16>{}) : f(Type<float>{});
}

/* Calls f with the Type of an unquantised weight format. */
template <typename F>
auto with_weight(glm_weight_format format, F&& f) {
  if (format == GLM_W_BF16) return f(Type<bf16>{});
  return format == GLM_W_F16 ? f(Type<f16>{}) : f(Type<float>{});
}

inline size_t bytes_of(glm_dtype dtype) {
  switch (dtype) {
    case GLM_FP8_E4M3:
      return 1;
    case GLM_BF16:
    case GLM_F16:
    case GLM_U16:
      return 2;
    case GLM_F32:
    case GLM_I32:
      return 4;
  }
  return 4;
}

}  // namespace glm::cuda

#endif
