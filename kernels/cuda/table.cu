#include "group.h"
#include "memory.h"
#include "ops.h"
#include "stream.h"

namespace glm::cuda {

namespace {

size_t workspace_bytes(const glm_device* device, glm_op op, const void* args) {
  switch (op) {
    case GLM_OP_RMS_NORM:
      return rms_norm_workspace(device, static_cast<const glm_rms_norm_args*>(args));
    case GLM_OP_ALL_REDUCE:
      return all_reduce_workspace(device, static_cast<const glm_all_reduce_args*>(args));
    case GLM_OP_PAGED_ATTENTION:
      return paged_attention_workspace(device, static_cast<const glm_paged_attention_args*>(args));
    case GLM_OP_MOE_ROUTE:
      return moe_route_workspace(static_cast<const glm_moe_route_args*>(args));
    case GLM_OP_MOE_GATE_UP:
      return moe_gate_up_workspace(static_cast<const glm_moe_gate_up_args*>(args));
    case GLM_OP_MOE_DOWN:
      return moe_down_workspace(static_cast<const glm_moe_down_args*>(args));
    case GLM_OP_SAMPLE:
      return sample_workspace(static_cast<const glm_sample_args*>(args));
    case GLM_OP_REDUCE_SCATTER:
      return reduce_scatter_workspace(device, static_cast<const glm_reduce_scatter_args*>(args));
    case GLM_OP_ALL_GATHER:
      return all_gather_workspace(device, static_cast<const glm_all_gather_args*>(args));
    case GLM_OP_MOE_DISPATCH:
      return moe_dispatch_workspace(device, static_cast<const glm_moe_dispatch_args*>(args));
    case GLM_OP_MOE_DOWN_EACH:
      return moe_down_each_workspace(static_cast<const glm_moe_down_each_args*>(args));
    case GLM_OP_MOE_COMBINE:
      return moe_combine_workspace(device, static_cast<const glm_moe_combine_args*>(args));
    default:
      return 0;
  }
}

constexpr glm_kernels kTable = {
    .version = GLM_KERNELS_VERSION,
    .name = "cuda",
    .flags = 0,
    .device_open = device_open,
    .device_close = device_close,
    .device_description = device_description,
    .workspace_bytes = workspace_bytes,
    .set_workspace = set_workspace,
    .last_error = glm_cuda_last_error,
    .memory_info = glm_cuda_memory_info,
    .memory_alloc = glm_cuda_memory_alloc,
    .memory_free = glm_cuda_memory_free,
    .host_alloc = glm_cuda_host_alloc,
    .host_free = glm_cuda_host_free,
    .copy_in = glm_cuda_copy_in,
    .copy_out = glm_cuda_copy_out,
    .fill = fill,
    .update_pages = update_pages,
    .synchronize = glm_cuda_synchronize,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_wait = event_wait,
    .event_elapsed = event_elapsed,
    .graph_begin = glm_cuda_graph_begin,
    .graph_end = glm_cuda_graph_end,
    .graph_launch = glm_cuda_graph_launch,
    .graph_free = graph_free,
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
    .group_progress = group_progress,
};

}  // namespace

}  // namespace glm::cuda

extern "C" __attribute__((visibility("default"))) const glm_kernels* glm_kernels_query(uint32_t version) {
  return version == GLM_KERNELS_VERSION ? &glm::cuda::kTable : nullptr;
}
