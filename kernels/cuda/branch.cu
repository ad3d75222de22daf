#include <algorithm>

#include "branch.h"
#include "device.h"

namespace glm::cuda {

namespace {

bool meets_any(const Touched& touched, const std::vector<Touched>& calls) {
  return std::any_of(calls.begin(), calls.end(), [&](const Touched& call) { return touched.meets(call); });
}

Line choose_line(const Branch& branch, const Touched& touched, LineOfCall::Kind kind) {
  if (branch.fork.empty()) return Line::kJoined;
  if (kind == LineOfCall::Kind::kMayBranch && !meets_any(touched, branch.main)) return Line::kBranch;
  return meets_any(touched, branch.calls) ? Line::kJoined : Line::kMain;
}

/* `second` waits for what is recorded of `first`. */
glm_status wait_for(glm_device* device, cudaStream_t second, cudaStream_t first) {
  const cudaEvent_t event = device->branch.event;
  const glm_status recorded = check(device, cudaEventRecord(event, first), "cudaEventRecord (branch)");
  if (recorded != GLM_OK) return recorded;
  return check(device, cudaStreamWaitEvent(second, event, 0), "cudaStreamWaitEvent (branch)");
}

glm_status open_branch(glm_device* device) {
  Branch& branch = device->branch;
  branch.is_open = true;
  ++branch.opened;
  /* Makes the stream part of the recording; but it is at the fork that it begins. */
  const glm_status status = wait_for(device, branch.stream, device->stream);
  if (status != GLM_OK) return status;
  return check(device,
               cudaStreamUpdateCaptureDependencies(branch.stream, branch.fork.data(), nullptr, branch.fork.size(),
                                                   cudaStreamSetCaptureDependencies),
               "cudaStreamUpdateCaptureDependencies");
}

}  // namespace

LineOfCall::LineOfCall(glm_device* device, const Touched& touched, Kind kind) : branch_(device->branch) {
  branch_.line = choose_line(branch_, touched, kind);
  if (branch_.line == Line::kMain) branch_.main.push_back(touched);
  if (branch_.line == Line::kBranch) branch_.calls.push_back(touched);
}

LineOfCall::~LineOfCall() {
  branch_.line = Line::kJoined;
}

bool LineOfCall::is_branch() const {
  return branch_.line == Line::kBranch;
}

cudaError_t create_branch(glm_device* device) {
  Branch& branch = device->branch;
  if (cudaError_t result = cudaStreamCreateWithFlags(&branch.stream, cudaStreamNonBlocking); result != cudaSuccess) {
    return result;
  }
  return cudaEventCreateWithFlags(&branch.event, cudaEventDisableTiming);
}

void destroy_branch(glm_device* device) {
  if (device->branch.stream != nullptr) cudaStreamDestroy(device->branch.stream);
  if (device->branch.event != nullptr) cudaEventDestroy(device->branch.event);
}

void begin_branches(glm_device* device) {
  device->branch.is_recording = true;
}

glm_status end_branches(glm_device* device) {
  device->branch.is_recording = false;
  return join_branch(device);
}

glm_status join_branch(glm_device* device) {
  Branch& branch = device->branch;
  branch.fork.clear();
  branch.main.clear();
  branch.calls.clear();
  if (!branch.is_open) return GLM_OK;
  branch.is_open = false;
  return wait_for(device, device->stream, branch.stream);
}

glm_status mark_fork(glm_device* device) {
  if (!device->branch.is_recording) return GLM_OK;
  if (const glm_status status = join_branch(device); status != GLM_OK) return status;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
  const glm_status status =
      check(device, cudaStreamGetCaptureInfo(device->stream, &capture, nullptr, nullptr, &nodes, nullptr, &count),
            "cudaStreamGetCaptureInfo");
  if (status == GLM_OK) device->branch.fork.assign(nodes, nodes + count);
  return status;
}

bool joins_branch(const glm_device* device) {
  return device->branch.is_open && device->branch.line == Line::kJoined;
}

glm_status stream_of_call(glm_device* device, cudaStream_t* stream) {
  Branch& branch = device->branch;
  const bool is_branch = branch.line == Line::kBranch;
  *stream = is_branch ? branch.stream : device->stream;
  if (is_branch) return branch.is_open ? GLM_OK : open_branch(device);
  return branch.line == Line::kJoined ? join_branch(device) : GLM_OK;
}

}  // namespace glm::cuda
