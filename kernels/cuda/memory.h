/* Memory, streams and graphs of a CUDA device: what the runtime needs beside the operations of the table.
 *
 * Every function returns GLM_OK or a status whose text glm_cuda_last_error gives. Copies and fills are ordered in the
 * device's stream after what was submitted before; a host range must stay unchanged until the stream has passed the copy.
 * Most of them are the table's members of the same names. */
#ifndef GLM_CUDA_MEMORY_H
#define GLM_CUDA_MEMORY_H

#include "glm/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Text of the device's last failed call; empty if none failed. Valid until the next call on the device. */
const char* glm_cuda_last_error(const glm_device* device);

/* Bytes of device memory that are free now, and that the GPU has. */
glm_status glm_cuda_memory_info(glm_device* device, size_t* free_bytes, size_t* total_bytes);

/* Device memory, aligned to 256 bytes. */
glm_status glm_cuda_memory_alloc(glm_device* device, size_t bytes, void** out);
glm_status glm_cuda_memory_free(glm_device* device, void* data);

/* Page-locked host memory, which copies to and from the device can use directly. */
glm_status glm_cuda_host_alloc(glm_device* device, size_t bytes, void** out);
glm_status glm_cuda_host_free(glm_device* device, void* data);

glm_status glm_cuda_copy_in(glm_device* device, void* device_data, const void* host_data, size_t bytes);
glm_status glm_cuda_copy_out(glm_device* device, void* host_data, const void* device_data, size_t bytes);
glm_status glm_cuda_copy(glm_device* device, void* to, const void* from, size_t bytes);
glm_status glm_cuda_fill(glm_device* device, void* device_data, int byte, size_t bytes);

/* Waits until everything submitted so far has run; reports a fault of any of it. */
glm_status glm_cuda_synchronize(glm_device* device);

/* Operations between begin and end are recorded, not run. launch replays them in the device's stream. */
glm_status glm_cuda_graph_begin(glm_device* device);
glm_status glm_cuda_graph_end(glm_device* device, glm_graph** out);
glm_status glm_cuda_graph_launch(glm_device* device, glm_graph* graph);
glm_status glm_cuda_graph_free(glm_device* device, glm_graph* graph);

/* Reads a range (aligned to 16 bytes) and does nothing with it: timed, it gives the bandwidth that other kernels are measured against. */
glm_status glm_cuda_read(glm_device* device, void* data, size_t bytes);

/* From now on, in the device's stream: no other kernel runs on the GPU for so long; its kernels fail, for good. */
glm_status glm_cuda_occupy(glm_device* device, uint64_t nanoseconds);
glm_status glm_cuda_fault(glm_device* device);

/* How many branches (branch.h) the graphs have that were recorded since the device was opened. */
uint64_t glm_cuda_branches(const glm_device* device);

/* Milliseconds that `replays` launches of the graph take, measured by events around them. */
glm_status glm_cuda_graph_time(glm_device* device, glm_graph* graph, int replays, float* milliseconds);

/* The device's stream, a cudaStream_t: for what other libraries' functions are measured in. */
void* glm_cuda_stream(glm_device* device);

/* A ReducePath (collective.h) that sums over ranks take from now on where the message allows it; 0: by size. */
void glm_cuda_set_reduce_path(int32_t path);

/* 1: groups made from now on are those of a machine whose GPUs do not reach each other's memory. */
void glm_cuda_pretend_no_peers(int32_t pretends);

#ifdef __cplusplus
}
#endif

#endif
