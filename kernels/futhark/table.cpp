#include "device.h"

namespace glm::fut {

namespace {

/* Without graphs, which cannot record what Futhark's own stream runs, and without groups and what needs one. */
const glm_kernels kKernels = {
    .version = GLM_KERNELS_VERSION,
    .name = "futhark",
    .flags = kTableFlags,
    .device_open = device_open,
    .device_close = device_close,
    .device_description = device_description,
    .workspace_bytes = workspace_bytes,
    .set_workspace = set_workspace,
    .last_error = last_error,
    .memory_info = memory_info,
    .memory_alloc = memory_alloc,
    .memory_free = memory_free,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .copy_in = copy_in,
    .copy_out = copy_out,
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
    .group_create = nullptr,
    .group_abort = nullptr,
    .group_destroy = nullptr,
    .embed = glm_futhark_embed,
    .rms_norm = glm_futhark_rms_norm,
    .quantize = glm_futhark_quantize,
    .linear = glm_futhark_linear,
    .qk_norm_rope_store = glm_futhark_qk_norm_rope_store,
    .paged_attention = glm_futhark_paged_attention,
    .silu_mul = glm_futhark_silu_mul,
    .moe_route = glm_futhark_moe_route,
    .moe_group = glm_futhark_moe_group,
    .moe_gate_up = glm_futhark_moe_gate_up,
    .moe_down = glm_futhark_moe_down,
    .all_reduce = nullptr,
    .gather_rows = glm_futhark_gather_rows,
    .sample = glm_futhark_sample,
    .reduce_scatter = nullptr,
    .all_gather = nullptr,
    .moe_dispatch = nullptr,
    .moe_down_each = nullptr,
    .moe_combine = nullptr,
    .group_progress = nullptr,
};

}  // namespace

}  // namespace glm::fut

extern "C" __attribute__((visibility("default"))) const glm_kernels* glm_kernels_query(uint32_t version) {
  return version == GLM_KERNELS_VERSION ? &glm::fut::kKernels : nullptr;
}
