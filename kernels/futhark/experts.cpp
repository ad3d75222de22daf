#include <algorithm>
#include <new>
#include <vector>

#include "device.h"

namespace {

size_t element_size(glm_weight_format format) {
  if (format == GLM_W_F32) return 4;
  return format == GLM_W_BF16 || format == GLM_W_F16 ? 2 : 1;
}

/* The lowest address, and in `at` how many elements after it each begins. */
const void* span(const std::vector<const void*>& starts, size_t size, int64_t* at) {
  const char* base = static_cast<const char*>(*std::min_element(starts.begin(), starts.end()));
  for (size_t i = 0; i < starts.size(); ++i) {
    at[i] = (static_cast<const char*>(starts[i]) - base) / static_cast<int64_t>(size);
  }
  return base;
}

/* Futhark has them as one array, and an OpenCL array lies in one buffer. */
glm_status in_one_memory([[maybe_unused]] glm_device* device, [[maybe_unused]] const std::vector<const void*>& starts) {
#ifdef GLM_FUTHARK_OPENCL
  const auto buffer = [&](const void* start) { return device->buffers.find(start).buffer; };
  const auto elsewhere = [&](const void* start) { return buffer(start) != buffer(starts[0]); };
  if (std::any_of(starts.begin(), starts.end(), elsewhere)) {
    return glm_unsupported(device, "experts", "matrices or scales of one layer in several allocations");
  }
#endif
  return GLM_OK;
}

}  // namespace

glm_status glm_experts_open(glm_device* device, const glm_expert_weights* weights, glm_experts* out) {
  const auto count = static_cast<size_t>(weights->count);
  *out = {};
  std::vector<glm_weight> experts(count);
  glm_status status = glm::fut::copy_out(device, experts.data(), weights->experts, count * sizeof(glm_weight));
  if (status != GLM_OK) return status;
  out->at = new (std::nothrow) int64_t[2 * count + 1]{};
  if (out->at == nullptr) return glm::fut::failed(device, GLM_OUT_OF_MEMORY, "no memory for the places of experts");
  out->scale_at = out->at + count;
  if (count == 0) return GLM_OK;
  std::vector<const void*> data(count), scale(count);
  for (size_t i = 0; i < count; ++i) {
    data[i] = experts[i].data;
    scale[i] = experts[i].scale;
  }
  status = in_one_memory(device, data);
  if (status == GLM_OK && scale[0] != nullptr) status = in_one_memory(device, scale);
  if (status != GLM_OK) return status;
  out->stride = experts[0].stride;
  out->scale_stride = experts[0].scale_stride;
  out->base = span(data, element_size(weights->format), out->at);
  if (scale[0] != nullptr) out->scale = span(scale, sizeof(float), out->scale_at);
  return GLM_OK;
}

void glm_experts_close(glm_experts* experts) {
  delete[] experts->at;
}
