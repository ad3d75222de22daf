/* Branches of a graph: calls that have nothing to do with those of the main line, recorded in a stream of their own.
 *
 * moe_route marks a fork. Of the calls that follow, those that may branch do so if they touch nothing that the main line writes since, nor write
 * what it touches: the shared expert's. Their kernels depend on what the fork depended on, so the router is recorded, and starts, before
 * them. The main line's first kernel whose call touches what they do, or does not say what it touches, waits for the branch. Dependencies stay
 * programmatic: a kernel's wait is for all kernels that it depends on, and as each of them has waited likewise, for all before them. */
#ifndef GLM_CUDA_BRANCH_H
#define GLM_CUDA_BRANCH_H

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "glm/kernels.h"
#include "touched.h"

struct glm_device;

namespace glm::cuda {

/* Which line of the graph the call that is being recorded belongs to. */
enum class Line {
  kJoined, /* the main line, which the branch joins first */
  kMain,
  kBranch
};

struct Branch {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  bool is_recording = false;
  bool is_open = false;
  uint64_t opened = 0; /* branches since the device was opened */
  Line line = Line::kJoined;
  std::vector<cudaGraphNode_t> fork; /* what the router depends on; empty: nothing may branch */
  std::vector<Touched> main;         /* of the main line's calls since the fork */
  std::vector<Touched> calls;        /* of the branch's */
};

/* A call that says what it touches. In scope while its kernels are launched. */
class LineOfCall {
 public:
  enum class Kind { kMain, kMayBranch };
  LineOfCall(glm_device* device, const Touched& touched, Kind kind = Kind::kMain);
  ~LineOfCall();
  LineOfCall(const LineOfCall&) = delete;
  LineOfCall& operator=(const LineOfCall&) = delete;

  bool is_branch() const;

 private:
  Branch& branch_;
};

cudaError_t create_branch(glm_device* device);
void destroy_branch(glm_device* device);

/* Around the recording of a graph; the second before it ends. */
void begin_branches(glm_device* device);
glm_status end_branches(glm_device* device);

/* The main line waits for the branch, if there is one; before whatever is recorded in the device's stream and is no kernel. */
glm_status join_branch(glm_device* device);

/* The next call of the main line is the first that those which may branch can run beside. */
glm_status mark_fork(glm_device* device);

/* Whether the call that is being recorded waits for a branch, and so may read nothing before its wait that a branch may have written. */
bool joins_branch(const glm_device* device);

/* Where the call that is being recorded launches its next kernel. */
glm_status stream_of_call(glm_device* device, cudaStream_t* stream);

}  // namespace glm::cuda

#endif
