#include <cstring>

#include "device.h"
#include "ops.h"
#include "row_grain.h"
#include "tensor_access.h"

GLM_CPU_BEGIN

glm_status gather_rows(glm_device* device, const glm_gather_rows_args* args) {
  const size_t bytes = static_cast<size_t>(args->out.cols) * dtype_bytes(args->out.dtype);
  parallel_for(device->pool, args->rows, row_grain(args->out.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t sample = begin; sample < end; ++sample) {
      std::memcpy(row_of(args->out, sample), row_of(args->x, args->step->sample_rows[sample]), bytes);
    }
  });
  return GLM_OK;
}

GLM_CPU_END
