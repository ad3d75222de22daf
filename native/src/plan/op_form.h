// The ops by name: which keys a plan line of each kind must and may have.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "glm/kernels.h"

namespace glm {

struct OpForm {
  std::string_view name;
  std::vector<std::string_view> required;
  std::vector<std::string_view> optional;
};

const OpForm& op_form(glm_op kind);
// Whether ranks exchange data in every op of this kind; in rms_norm they do where it says so, and in `sample` where
// there are several.
bool is_exchange(glm_op kind);

std::optional<glm_op> find_op(std::string_view name);

}  // namespace glm
