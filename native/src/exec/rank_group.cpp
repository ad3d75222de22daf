#include "exec/rank_group.h"

#include "support/error.h"

namespace glm {

RankGroup::~RankGroup() {
  if (group_ != nullptr) kernels_->group_destroy(group_);
}

void RankGroup::create(const std::vector<const Device*>& devices) {
  kernels_ = &devices.front()->kernels();
  num_ranks_ = devices.size();
  if (kernels_->group_create == nullptr) {
    fail(GLM_UNSUPPORTED, "kernel table ", kernels_->name, " runs one rank only, expected 1, got ", devices.size());
  }
  std::vector<glm_device*> handles;
  for (const Device* device : devices) handles.push_back(device->handle());
  char error[512] = "";
  const glm_status status =
      kernels_->group_create(handles.data(), static_cast<int32_t>(handles.size()), &group_, error, sizeof(error));
  if (status != GLM_OK) fail(status, "kernel table ", kernels_->name, ": a group of ", handles.size(), ": ", error);
}

std::vector<uint64_t> RankGroup::progress() const {
  if (group_ == nullptr || kernels_->group_progress == nullptr) return {};
  std::vector<uint64_t> begun(num_ranks_);
  kernels_->group_progress(group_, begun.data());
  return begun;
}

void RankGroup::abort() {
  if (group_ != nullptr) kernels_->group_abort(group_);
}

}  // namespace glm
