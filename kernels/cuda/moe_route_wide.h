/* The router of many tokens: the same bits as for few, with tokens and weights read fewer times. */
#ifndef GLM_CUDA_MOE_ROUTE_WIDE_H
#define GLM_CUDA_MOE_ROUTE_WIDE_H

#include "device.h"

namespace glm::cuda {

/* Scores from bf16 activations into logits[rows][experts]. W: type of the weights. */
template <typename W>
bool are_route_logits_wide(const glm_moe_route_args& args);
template <typename W>
glm_status route_logits_wide(glm_device* device, const glm_moe_route_args& args, bool beside, float* logits);

/* The choice of experts from logits[rows][experts]. */
bool is_route_select_wide(const glm_moe_route_args& args);
glm_status route_select_wide(glm_device* device, const glm_moe_route_args& args, const float* logits);

}  // namespace glm::cuda

#endif
