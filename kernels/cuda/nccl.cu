#include <dlfcn.h>

#include <memory>

#include "nccl.h"

namespace glm::cuda {

namespace {

constexpr const char* kLibrary = "libnccl.so.2";
constexpr int kBytesType = 1; /* ncclUint8 */

template <typename Function>
bool find(void* library, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  return *out != nullptr;
}

bool find_all(void* library, Nccl* nccl) {
  return find(library, "ncclGetVersion", &nccl->GetVersion) && find(library, "ncclCommInitAll", &nccl->CommInitAll) &&
         find(library, "ncclCommAbort", &nccl->CommAbort) && find(library, "ncclGroupStart", &nccl->GroupStart) &&
         find(library, "ncclGroupEnd", &nccl->GroupEnd) && find(library, "ncclSend", &nccl->Send) &&
         find(library, "ncclRecv", &nccl->Recv) && find(library, "ncclAllGather", &nccl->AllGather) &&
         find(library, "ncclGetErrorString", &nccl->GetErrorString);
}

}  // namespace

const Nccl* load_nccl(std::string* error) {
  static Nccl nccl;
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL); /* for as long as the process lives */
  if (library == nullptr) {
    *error = std::string(dlerror()) + "; install NCCL 2 (Python package nvidia-nccl-cu13) where the loader finds it";
    return nullptr;
  }
  if (!find_all(library, &nccl)) {
    *error = std::string(kLibrary) + " is not NCCL 2.7 or newer: " + dlerror();
    return nullptr;
  }
  return &nccl;
}

glm_status check_nccl(glm_device* device, int result, const char* what) {
  if (result == 0) return GLM_OK;
  device->last_error = std::string(what) + ": " + device->nccl->GetErrorString(result);
  return GLM_DEVICE_ERROR;
}

int send_bytes(const glm_device* device, const void* data, size_t bytes, int peer) {
  if (bytes == 0) return 0;
  return device->nccl->Send(data, bytes, kBytesType, peer, device->communicator, device->stream);
}

int receive_bytes(const glm_device* device, void* data, size_t bytes, int peer) {
  if (bytes == 0) return 0;
  return device->nccl->Recv(data, bytes, kBytesType, peer, device->communicator, device->stream);
}

}  // namespace glm::cuda
