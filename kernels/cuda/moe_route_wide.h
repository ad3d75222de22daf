/* The router of many tokens: the same bits as for few, with tokens and weights read fewer times. */
#ifndef GLM_CUDA_MOE_ROUTE_WIDE_H
#define GLM_CUDA_MOE_ROUTE_WIDE_H

#include "device.h"

namespace glm::cuda {

/* Scores from bf16 activations into logits[rows][experts]. W: type of the weights. */
template <typename W>
bool are_route_logits_wide(const glm_device* device, const glm_moe_route_args& args);
template <typename W>
glm_status route_logits_wide(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits);

/* The choice of experts from their scores. */
struct RouteChoice {
  const float* logits; /* [rows][experts] */
  const float* bias;
  int32_t rows;
  int32_t experts;
  int32_t top_k;
  int32_t groups;
  int32_t topk_groups;
  int32_t normalize;
  float scale;
  glm_tensor ids;
  glm_tensor weights;
  const int32_t* places;
};
bool is_route_select_wide(const RouteChoice& p);
glm_status route_select_wide(glm_device* device, const RouteChoice& p);

}  // namespace glm::cuda

#endif
