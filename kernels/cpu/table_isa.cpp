/* The table of one instruction set. */
#include "device.h"
#include "fp8.h"
#include "group.h"
#include "memory.h"
#include "ops.h"

GLM_CPU_BEGIN

namespace {

glm_status open_device(const glm_device_options* options, glm_device** out, char* error, size_t error_size) {
  return device_open(GLM_STRINGIFY(GLM_ISA), options, out, error, error_size);
}

size_t workspace_bytes(const glm_device* device, glm_op op, const void* args) {
  switch (op) {
    case GLM_OP_QUANTIZE:
      return quantize_workspace(device, static_cast<const glm_quantize_args*>(args));
    case GLM_OP_RMS_NORM:
      return rms_norm_workspace(device, static_cast<const glm_rms_norm_args*>(args));
    case GLM_OP_QK_NORM_ROPE_STORE:
      return qk_norm_rope_store_workspace(device, static_cast<const glm_qk_norm_rope_store_args*>(args));
    case GLM_OP_SILU_MUL:
      return silu_mul_workspace(device, static_cast<const glm_silu_mul_args*>(args));
    case GLM_OP_PAGED_ATTENTION:
      return paged_attention_workspace(device, static_cast<const glm_paged_attention_args*>(args));
    case GLM_OP_LINEAR:
      return linear_workspace(device, static_cast<const glm_linear_args*>(args));
    case GLM_OP_MOE_ROUTE:
      return moe_route_workspace(device, static_cast<const glm_moe_route_args*>(args));
    case GLM_OP_MOE_GATE_UP:
      return moe_gate_up_workspace(device, static_cast<const glm_moe_gate_up_args*>(args));
    case GLM_OP_MOE_DOWN:
      return moe_down_workspace(device, static_cast<const glm_moe_down_args*>(args));
    case GLM_OP_MOE_DOWN_EACH:
      return moe_down_each_workspace(device, static_cast<const glm_moe_down_each_args*>(args));
    case GLM_OP_SAMPLE:
      return sample_workspace(device, static_cast<const glm_sample_args*>(args));
    default:
      return 0;
  }
}

const glm_kernels kKernels = {
    .version = GLM_KERNELS_VERSION,
    .name = "cpu",
    .flags = GLM_TABLE_HOST_MEMORY,
    .device_open = open_device,
    .device_close = device_close,
    .device_description = device_description,
    .workspace_bytes = workspace_bytes,
    .set_workspace = set_workspace,
    .last_error = last_error,
    .memory_info = memory_info,
    .memory_alloc = memory_alloc,
    .memory_free = memory_free,
    .host_alloc = memory_alloc,
    .host_free = memory_free,
    .copy_in = copy,
    .copy_out = copy,
    .fill = fill,
    .update_pages = update_pages,
    .synchronize = synchronize,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_wait = event_wait,
    .event_elapsed = event_elapsed,
    .graph_begin = nullptr,
    .graph_end = nullptr,
    .graph_launch = nullptr,
    .graph_free = nullptr,
    .group_create = group_create,
    .group_abort = group_abort,
    .group_destroy = group_destroy,
    .embed = embed,
    .rms_norm = rms_norm,
    .quantize = quantize,
    .linear = linear,
    .qk_norm_rope_store = qk_norm_rope_store,
    .paged_attention = paged_attention,
    .silu_mul = silu_mul,
    .moe_route = moe_route,
    .moe_group = moe_group,
    .moe_gate_up = moe_gate_up,
    .moe_down = moe_down,
    .all_reduce = all_reduce,
    .gather_rows = gather_rows,
    .sample = sample,
    .reduce_scatter = reduce_scatter,
    .all_gather = all_gather,
    .moe_dispatch = moe_dispatch,
    .moe_down_each = moe_down_each,
    .moe_combine = moe_combine,
    .group_progress = nullptr,
};

}  // namespace

extern const IsaEntry kIsaEntry;
const IsaEntry kIsaEntry = {
    .name = GLM_STRINGIFY(GLM_ISA), .kernels = &kKernels, .fp8_encode = fp8_encode, .fp8_decode = fp8_decode};

GLM_CPU_END
