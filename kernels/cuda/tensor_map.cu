#include <cudaTypedefs.h>

#include <cstdio>
#include <string>

#include "tensor_map.h"

namespace glm::cuda {

namespace {

constexpr int kBoxColumns = 128;

/* The driver's function, through the runtime: nothing is linked to the driver. */
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  constexpr unsigned kCuda12 = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kCuda12, cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

std::string refusal(const char* what, const void* data, const cuuint64_t sizes[2], int64_t stride,
                    const cuuint32_t box[2]) {
  char text[256];
  std::snprintf(
      text, sizeof(text),
      "cuTensorMapEncodeTiled: %s: %llu rows of %llu bytes, %lld bytes apart, at %p, in boxes of %u rows of %u bytes",
      what, static_cast<unsigned long long>(sizes[1]), static_cast<unsigned long long>(sizes[0]),
      static_cast<long long>(stride), data, box[1], box[0]);
  return text;
}

}  // namespace

glm_status encode_map(glm_device* device, const char* what, CUtensorMap* map, const void* data, int64_t rows,
                      int64_t columns, int64_t stride, int box_rows) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) return check(device, cudaErrorNotSupported, "cuTensorMapEncodeTiled: install a newer driver");
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[2] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[2] = {1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides, box,
                                 element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return GLM_OK;
  return check(device, cudaErrorInvalidValue, refusal(what, data, sizes, stride, box).c_str());
}

}  // namespace glm::cuda
