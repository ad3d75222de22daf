// The C boundary: every exception becomes a status and a line of text.
#include <cstring>
#include <exception>
#include <new>
#include <span>

#include "engine/rank_set.h"
#include "exec/read_bandwidth.h"
#include "glm/runtime.h"
#include "support/error.h"

#define GLM_EXPORT extern "C" __attribute__((visibility("default")))

struct glm_engine {
  glm::RankSet ranks;
};

namespace {

void set_message(glm_error* error, const char* message) {
  if (error == nullptr) return;
  std::strncpy(error->message, message, sizeof(error->message) - 1);
  error->message[sizeof(error->message) - 1] = '\0';
}

template <class Body>
glm_status guard(glm_error* error, Body body) {
  try {
    set_message(error, "");
    body();
    return GLM_OK;
  } catch (const glm::Failure& failure) {
    set_message(error, failure.what());
    return failure.status();
  } catch (const std::bad_alloc&) {
    set_message(error, "out of memory for the runtime's own records");
    return GLM_OUT_OF_MEMORY;
  } catch (const std::exception& unexpected) {
    set_message(error, unexpected.what());
    return GLM_INTERNAL;
  }
}

template <class... Pointers>
void require(const Pointers*... pointers) {
  if (((pointers == nullptr) || ...)) glm::fail(GLM_INVALID_ARGUMENT, "a required pointer is NULL");
}

}  // namespace

GLM_EXPORT uint32_t glm_runtime_version(void) {
  return GLM_RUNTIME_VERSION;
}

GLM_EXPORT glm_status glm_engine_probe(const char* kernels_path, int32_t ordinal, glm_error* error) {
  return guard(error, [&] {
    require(kernels_path);
    glm::KernelTable(kernels_path, {}).open_device({.ordinal = ordinal, .num_threads = 1});
  });
}

GLM_EXPORT glm_status glm_engine_read_bandwidth(const char* kernels_path, int32_t ordinal, int32_t num_threads,
                                                double* out, glm_error* error) {
  return guard(error, [&] {
    require(kernels_path, out);
    *out = glm::read_bandwidth(kernels_path, {.ordinal = ordinal, .num_threads = num_threads});
  });
}

GLM_EXPORT glm_status glm_engine_create(const glm_engine_options* options, glm_engine** out, glm_error* error) {
  return guard(error, [&] {
    require(options, out);
    *out = nullptr;
    *out = new glm_engine{glm::RankSet(*options)};
  });
}

GLM_EXPORT void glm_engine_destroy(glm_engine* engine) {
  delete engine;
}

GLM_EXPORT glm_status glm_engine_get_info(const glm_engine* engine, glm_engine_info* out, glm_error* error) {
  return guard(error, [&] {
    require(engine, out);
    *out = engine->ranks.info();
  });
}

GLM_EXPORT glm_status glm_engine_bind_slot(glm_engine* engine, int32_t slot, const glm_sampling* sampling,
                                           const int32_t* prompt, int32_t num_prompt, const int32_t* sampled,
                                           int32_t num_sampled, glm_error* error) {
  return guard(error, [&] {
    require(engine, sampling);
    engine->ranks.bind_slot(slot, *sampling, prompt, num_prompt, sampled, num_sampled);
  });
}

GLM_EXPORT glm_status glm_engine_release_slot(glm_engine* engine, int32_t slot, glm_error* error) {
  return guard(error, [&] {
    require(engine);
    engine->ranks.release_slot(slot);
  });
}

GLM_EXPORT glm_status glm_engine_submit(glm_engine* engine, const glm_step_batch* batch, glm_error* error) {
  return guard(error, [&] {
    require(engine, batch);
    engine->ranks.submit(*batch);
  });
}

GLM_EXPORT glm_status glm_engine_set_masks(glm_engine* engine, const uint32_t* masks, glm_error* error) {
  return guard(error, [&] {
    require(engine, masks);
    engine->ranks.set_masks(masks);
  });
}

GLM_EXPORT glm_status glm_engine_collect(glm_engine* engine, glm_step_result* out, glm_error* error) {
  return guard(error, [&] {
    require(engine, out);
    *out = engine->ranks.collect();
  });
}

GLM_EXPORT glm_status glm_engine_run_ops(glm_engine* engine, const glm_step_batch* batch, const int32_t* ops,
                                         int32_t num_ops, int32_t repeats, glm_step_result* out, glm_error* error) {
  return guard(error, [&] {
    require(engine, batch, out);
    if (num_ops < 0) glm::fail(GLM_INVALID_ARGUMENT, "num_ops ", num_ops, ", expected at least 0");
    if (num_ops > 0) require(ops);
    *out = engine->ranks.run_ops(*batch, std::span(ops, static_cast<size_t>(num_ops)), repeats);
  });
}

GLM_EXPORT glm_status glm_engine_write_buffer(glm_engine* engine, int32_t rank, const char* name, int32_t rows,
                                              const void* data, size_t bytes, glm_error* error) {
  return guard(error, [&] {
    require(engine, name, data);
    engine->ranks.rank(rank).write_buffer(name, rows, data, bytes);
  });
}

GLM_EXPORT glm_status glm_engine_read_buffer(glm_engine* engine, int32_t rank, const char* name, int32_t rows,
                                             void* out, size_t bytes, glm_error* error) {
  return guard(error, [&] {
    require(engine, name, out);
    engine->ranks.rank(rank).read_buffer(name, rows, out, bytes);
  });
}

GLM_EXPORT glm_status glm_engine_expert_loads(glm_engine* engine, int32_t rank, uint64_t* out, size_t count,
                                              glm_error* error) {
  return guard(error, [&] {
    require(engine, out);
    engine->ranks.rank(rank).read_expert_loads(std::span(out, count));
  });
}

GLM_EXPORT glm_status glm_engine_get_progress(const glm_engine* engine, glm_engine_progress* out, glm_error* error) {
  return guard(error, [&] {
    require(engine, out);
    *out = engine->ranks.progress();
  });
}

GLM_EXPORT glm_status glm_engine_abort(glm_engine* engine, const char* reason, glm_error* error) {
  return guard(error, [&] {
    require(engine, reason);
    engine->ranks.abort(reason);
  });
}
