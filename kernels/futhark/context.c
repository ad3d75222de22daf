/* Compiled with the program that Futhark wrote, since two things are not in its header: which worker a thread of the
 * CPU is, and the context or queue of the GPU's driver. */
#include "context.h"

#include "glm_program.c"

#include <stdio.h>

/* Futhark ends the process if the GPU cannot be had, so that is found out first. */
#if defined(GLM_FUTHARK_CUDA)
static int cannot_start(int32_t ordinal, char* error, size_t error_size) {
  int count = 0;
  CUresult result = cuInit(0);
  if (result == CUDA_SUCCESS) result = cuDeviceGetCount(&count);
  if (result != CUDA_SUCCESS) {
    const char* text = NULL;
    cuGetErrorString(result, &text);
    snprintf(error, error_size, "the CUDA driver does not start: %s", text == NULL ? "unknown error" : text);
    return 1;
  }
  if (ordinal >= 0 && ordinal < count) return 0;
  snprintf(error, error_size, "ordinal is %d; this machine has %d GPUs", ordinal, count);
  return 1;
}
#elif defined(GLM_FUTHARK_HIP)
static int cannot_start(int32_t ordinal, char* error, size_t error_size) {
  int count = 0;
  const hipError_t result = hipGetDeviceCount(&count);
  if (result != hipSuccess) {
    snprintf(error, error_size, "the HIP driver does not start: %s", hipGetErrorString(result));
    return 1;
  }
  if (ordinal >= 0 && ordinal < count) return 0;
  snprintf(error, error_size, "ordinal is %d; this machine has %d GPUs", ordinal, count);
  return 1;
}
#elif defined(GLM_FUTHARK_OPENCL)
enum { kMostDevices = 64 };

/* Devices of all platforms, in the order in which Futhark counts them. */
static cl_uint all_devices(cl_device_id devices[kMostDevices]) {
  cl_platform_id platforms[kMostDevices];
  cl_uint num_platforms = 0;
  cl_uint count = 0;
  if (clGetPlatformIDs(kMostDevices, platforms, &num_platforms) != CL_SUCCESS) return 0;
  for (cl_uint i = 0; i < num_platforms && i < kMostDevices && count < kMostDevices; ++i) {
    cl_uint found = 0;
    const cl_uint room = kMostDevices - count;
    if (clGetDeviceIDs(platforms[i], CL_DEVICE_TYPE_ALL, room, devices + count, &found) != CL_SUCCESS) continue;
    count += found < room ? found : room;
  }
  return count;
}

static int cannot_start(int32_t ordinal, char* error, size_t error_size) {
  cl_device_id devices[kMostDevices];
  const cl_uint count = all_devices(devices);
  if (ordinal < 0 || (cl_uint)ordinal >= count) {
    snprintf(error, error_size, "ordinal is %d; this machine has %u OpenCL devices: `clinfo -l`", ordinal, count);
    return 1;
  }
  cl_uint doubles = 0;
  clGetDeviceInfo(devices[ordinal], CL_DEVICE_PREFERRED_VECTOR_WIDTH_DOUBLE, sizeof(doubles), &doubles, NULL);
  if (!f64_required || doubles > 0) return 0;
  snprintf(error, error_size, "OpenCL device %d has no double precision, which sampling needs", ordinal);
  return 1;
}

static int is_cpu(int32_t ordinal) {
  cl_device_id devices[kMostDevices];
  cl_device_type type = 0;
  all_devices(devices);
  clGetDeviceInfo(devices[ordinal], CL_DEVICE_TYPE, sizeof(type), &type, NULL);
  return (type & CL_DEVICE_TYPE_CPU) != 0;
}
#else
static int cannot_start(int32_t ordinal, char* error, size_t error_size) {
  if (ordinal == 0) return 0;
  snprintf(error, error_size, "ordinal is %d; the CPU is one device, 0", ordinal);
  return 1;
}
#endif

static void configure(struct futhark_context_config* config, int32_t num_threads, int32_t ordinal) {
  (void)config, (void)num_threads, (void)ordinal;
#ifdef GLM_FUTHARK_MULTICORE
  if (num_threads > 0) futhark_context_config_set_num_threads(config, num_threads);
#endif
#ifdef GLM_FUTHARK_OPENCL
  /* PoCL 3.1 loses statements of a block's first thread after a barrier in a branch: tests/pocl_barrier.c. */
  if (is_cpu(ordinal)) futhark_context_config_set_default_thread_block_size(config, 1);
#endif
#ifdef GLM_FUTHARK_GPU
  char name[16];
  snprintf(name, sizeof(name), "#%d", ordinal);
  futhark_context_config_set_device(config, name);
  futhark_context_config_set_unified_memory(config, 0);
  const char* cache = getenv("GLM_FUTHARK_CACHE");
  if (cache != NULL) futhark_context_config_set_cache_file(config, cache);
#endif
}

struct futhark_context* glm_context_open(int32_t num_threads, int32_t ordinal, char* error, size_t error_size) {
  if (cannot_start(ordinal, error, error_size)) return NULL;
  struct futhark_context_config* config = futhark_context_config_new();
  if (config == NULL) {
    snprintf(error, error_size, "no memory for a Futhark context");
    return NULL;
  }
  configure(config, num_threads, ordinal);
  struct futhark_context* context = futhark_context_new(config);
  char* text = context == NULL ? NULL : futhark_context_get_error(context);
  if (context != NULL && text == NULL) return context;
  snprintf(error, error_size, "%s", text == NULL ? "Futhark makes no context" : text);
  free(text);
  if (context != NULL) futhark_context_free(context);
  futhark_context_config_free(config);
  return NULL;
}

void glm_context_close(struct futhark_context* context) {
  struct futhark_context_config* config = context->cfg;
  glm_context_enter(context);
#ifdef GLM_FUTHARK_MULTICORE
  /* An operation that failed leaves tasks that nobody takes, and Futhark waits until its queues are empty. */
  for (int i = 0; i < context->scheduler.num_threads; ++i) context->scheduler.workers[i].q.num_used = 0;
#endif
  futhark_context_free(context);
  futhark_context_config_free(config);
}

void glm_context_enter(struct futhark_context* context) {
#if defined(GLM_FUTHARK_MULTICORE)
  worker_local = &context->scheduler.workers[0];
#elif defined(GLM_FUTHARK_HIP)
  (void)hipSetDevice(context->dev_id);
#else
  (void)context;
#endif
}

int glm_context_sync(struct futhark_context* context) {
  return futhark_context_sync(context);
}

char* glm_context_error(struct futhark_context* context) {
  return futhark_context_get_error(context);
}

void* glm_context_driver(struct futhark_context* context) {
#if defined(GLM_FUTHARK_CUDA)
  return context->cu_ctx;
#elif defined(GLM_FUTHARK_OPENCL)
  return context->queue;
#else
  (void)context;
  return NULL;
#endif
}
