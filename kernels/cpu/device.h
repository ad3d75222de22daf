#ifndef GLM_CPU_DEVICE_H
#define GLM_CPU_DEVICE_H

#include <cstddef>
#include <string>

#include "glm/kernels.h"
#include "thread_pool.h"

/* The CPU as a device: its stream is the calling thread. */
struct glm_device {
  glm::cpu::ThreadPool pool;
  std::string description;
  std::byte* workspace = nullptr; /* aligned to 64 bytes */
  size_t workspace_bytes = 0;
  glm_group* group = nullptr; /* of the ranks, this device among them; NULL: there is but one */
  int rank = 0;
};

namespace glm::cpu {

glm_status device_open(const char* isa, const glm_device_options* options, glm_device** out, char* error,
                       size_t error_size);
void device_close(glm_device* device);
const char* device_description(const glm_device* device);
void set_workspace(glm_device* device, void* data, size_t bytes);

}  // namespace glm::cpu

#endif
