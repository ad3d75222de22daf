/* The operations of one instruction set, and the scratch each of them needs (none, where no function says so). */
#ifndef GLM_CPU_OPS_H
#define GLM_CPU_OPS_H

#include "isa.h"

GLM_CPU_BEGIN

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
glm_status reduce_scatter(glm_device* device, const glm_reduce_scatter_args* args);
glm_status all_gather(glm_device* device, const glm_all_gather_args* args);
glm_status moe_dispatch(glm_device* device, const glm_moe_dispatch_args* args);
glm_status moe_down_each(glm_device* device, const glm_moe_down_each_args* args);
glm_status moe_combine(glm_device* device, const glm_moe_combine_args* args);
glm_status gather_rows(glm_device* device, const glm_gather_rows_args* args);
glm_status sample(glm_device* device, const glm_sample_args* args);

size_t rms_norm_workspace(const glm_device* device, const glm_rms_norm_args* args);
size_t quantize_workspace(const glm_device* device, const glm_quantize_args* args);
size_t linear_workspace(const glm_device* device, const glm_linear_args* args);
size_t qk_norm_rope_store_workspace(const glm_device* device, const glm_qk_norm_rope_store_args* args);
size_t paged_attention_workspace(const glm_device* device, const glm_paged_attention_args* args);
size_t silu_mul_workspace(const glm_device* device, const glm_silu_mul_args* args);
size_t moe_route_workspace(const glm_device* device, const glm_moe_route_args* args);
size_t moe_gate_up_workspace(const glm_device* device, const glm_moe_gate_up_args* args);
size_t moe_down_workspace(const glm_device* device, const glm_moe_down_args* args);
size_t moe_down_each_workspace(const glm_device* device, const glm_moe_down_each_args* args);
size_t sample_workspace(const glm_device* device, const glm_sample_args* args);

GLM_CPU_END

#endif
