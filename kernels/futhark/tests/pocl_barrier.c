/* What PoCL 3.1 does to a barrier in a branch that all threads of a block take: cc pocl_barrier.c -lOpenCL && ./a.out
 *
 * Futhark ends a reduction so: the block that comes last adds up what all have stored. Every line should say "1 1 7". With
 * more than one thread in a block PoCL 3.1 leaves out what the first thread does beside the barrier. */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>

static const char* const kProgram =
    "kernel void last_block(local int* flag, global int* counters, global int* out) {\n"
    "  const int first = get_local_id(0) == 0;\n"
    "  if (first) flag[0] = atomic_add(&counters[0], 1) == (int)get_num_groups(0) - 1;\n"
    "  barrier(CLK_GLOBAL_MEM_FENCE | CLK_LOCAL_MEM_FENCE);\n"
    "  int last = flag[0];\n"
    "  barrier(CLK_LOCAL_MEM_FENCE);\n"
    "  if (last) { barrier(CLK_LOCAL_MEM_FENCE); if (first) out[0] = 1; }\n"
    "  if (first) { out[2] = 7; flag[0] = atomic_add(&counters[1], 1) == (int)get_num_groups(0) - 1; }\n"
    "  barrier(CLK_GLOBAL_MEM_FENCE | CLK_LOCAL_MEM_FENCE);\n"
    "  last = flag[0];\n"
    "  if (last) { barrier(CLK_LOCAL_MEM_FENCE); if (first) out[1] = 1; }\n"
    "}\n";

static void run(cl_context context, cl_command_queue queue, cl_kernel kernel, size_t blocks, size_t threads) {
  int data[3] = {0};
  const cl_mem_flags flags = CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR;
  const cl_mem counters = clCreateBuffer(context, flags, sizeof(data), data, NULL);
  const cl_mem out = clCreateBuffer(context, flags, sizeof(data), data, NULL);
  const size_t all = blocks * threads;
  clSetKernelArg(kernel, 0, sizeof(int), NULL);
  clSetKernelArg(kernel, 1, sizeof(counters), &counters);
  clSetKernelArg(kernel, 2, sizeof(out), &out);
  clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &all, &threads, 0, NULL, NULL);
  clEnqueueReadBuffer(queue, out, CL_TRUE, 0, sizeof(data), data, 0, NULL, NULL);
  printf("%zu blocks of %zu threads: %d %d %d\n", blocks, threads, data[0], data[1], data[2]);
  clReleaseMemObject(counters);
  clReleaseMemObject(out);
}

int main(void) {
  cl_platform_id platform;
  cl_device_id device;
  if (clGetPlatformIDs(1, &platform, NULL) != CL_SUCCESS) return 1;
  if (clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL) != CL_SUCCESS) return 1;
  cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, NULL);
  cl_command_queue queue = clCreateCommandQueue(context, device, 0, NULL);
  cl_program program = clCreateProgramWithSource(context, 1, (const char**)&kProgram, NULL, NULL);
  if (clBuildProgram(program, 1, &device, "", NULL, NULL) != CL_SUCCESS) return 1;
  cl_kernel kernel = clCreateKernel(program, "last_block", NULL);
  for (size_t blocks = 1; blocks <= 4; blocks *= 2) {
    for (size_t threads = 1; threads <= 64; threads *= 8) run(context, queue, kernel, blocks, threads);
  }
  return 0;
}
