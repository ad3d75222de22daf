/* The operations of the table and the scratch that some of them need. */
#ifndef GLM_CUDA_OPS_H
#define GLM_CUDA_OPS_H

#include "device.h"

namespace glm::cuda {

glm_status embed(glm_device* device, const glm_embed_args* args);
glm_status rms_norm(glm_device* device, const glm_rms_norm_args* args);
glm_status quantize(glm_device* device, const glm_quantize_args* args);
glm_status linear(glm_device* device, const glm_linear_args* args);
glm_status qk_norm_rope_store(glm_device* device, const glm_qk_norm_rope_store_args* args);
glm_status paged_attention(glm_device* device, const glm_paged_attention_args* args);
glm_status silu_mul(glm_device* device, const glm_silu_mul_args* args);
glm_status moe_route(glm_device* device, const glm_moe_route_args* args);
glm_status moe_group(glm_device* device, const glm_moe_group_args* args);
glm_status moe_gate_up(glm_device* device, const glm_moe_gate_up_args* args);
glm_status moe_down(glm_device* device, const glm_moe_down_args* args);
glm_status all_reduce(glm_device* device, const glm_all_reduce_args* args);
glm_status gather_rows(glm_device* device, const glm_gather_rows_args* args);
glm_status sample(glm_device* device, const glm_sample_args* args);
glm_status reduce_scatter(glm_device* device, const glm_reduce_scatter_args* args);
glm_status all_gather(glm_device* device, const glm_all_gather_args* args);
glm_status moe_dispatch(glm_device* device, const glm_moe_dispatch_args* args);
glm_status moe_down_each(glm_device* device, const glm_moe_down_each_args* args);
glm_status moe_combine(glm_device* device, const glm_moe_combine_args* args);

size_t rms_norm_workspace(const glm_device* device, const glm_rms_norm_args* args);
size_t all_reduce_workspace(const glm_device* device, const glm_all_reduce_args* args);
size_t paged_attention_workspace(const glm_device* device, const glm_paged_attention_args* args);
size_t moe_route_workspace(const glm_moe_route_args* args);
size_t moe_gate_up_workspace(const glm_moe_gate_up_args* args);
size_t moe_down_workspace(const glm_moe_down_args* args);
size_t sample_workspace(const glm_sample_args* args);
size_t reduce_scatter_workspace(const glm_device* device, const glm_reduce_scatter_args* args);
size_t all_gather_workspace(const glm_device* device, const glm_all_gather_args* args);
size_t moe_dispatch_workspace(const glm_device* device, const glm_moe_dispatch_args* args);
size_t moe_down_each_workspace(const glm_moe_down_each_args* args);
size_t moe_combine_workspace(const glm_device* device, const glm_moe_combine_args* args);

}  // namespace glm::cuda

#endif
