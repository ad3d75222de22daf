#include <cmath>
#include <limits>

#include "engine/slots.h"
#include "support/error.h"

namespace glm {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

// `exclusive`: low itself is not allowed. NaN is in no range.
void check_float(const char* field, float value, float low, float high, bool exclusive = false) {
  if (!(value >= low && value <= high) || (exclusive && value == low)) {
    fail(GLM_INVALID_ARGUMENT, "sampling.", field, " ", value, ", expected ", exclusive ? "above " : "", low, " to ",
         high);
  }
}

void check_count(const char* field, int32_t value, int32_t low, int32_t high) {
  if (value < low || value > high) {
    fail(GLM_INVALID_ARGUMENT, "sampling.", field, " ", value, ", expected ", low, " to ", high);
  }
}

void check_tokens(const char* what, const int32_t* tokens, int32_t count, int32_t vocab) {
  if (count < 0) fail(GLM_INVALID_ARGUMENT, "number of ", what, " ", count, ", expected at least 0");
  if (count > 0 && tokens == nullptr) fail(GLM_INVALID_ARGUMENT, what, " is NULL, expected ", count, " elements");
  for (int32_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab) {
      fail(GLM_INVALID_ARGUMENT, what, "[", i, "] ", tokens[i], ", expected 0 to ", vocab - 1);
    }
  }
}

}  // namespace

void SlotMirror::check_binding(int32_t slot, const glm_sampling& sampling, const int32_t* prompt, int32_t num_prompt,
                               const int32_t* sampled, int32_t num_sampled) const {
  check_slot("slot", slot);
  if (bound(slot)) fail(GLM_INVALID_ARGUMENT, "slot ", slot, " is bound: release it first");
  constexpr int32_t most = std::numeric_limits<int32_t>::max();
  check_float("temperature", sampling.temperature, 0, kLargest);
  check_float("top_p", sampling.top_p, 0, 1, true);
  check_float("min_p", sampling.min_p, 0, 1);
  check_float("repetition_penalty", sampling.repetition_penalty, 0, kLargest, true);
  check_float("frequency_penalty", sampling.frequency_penalty, -kLargest, kLargest);
  check_float("presence_penalty", sampling.presence_penalty, -kLargest, kLargest);
  check_count("top_k", sampling.top_k, 0, most);
  check_count("min_tokens", sampling.min_tokens, 0, most);
  check_count("prompt_len", sampling.prompt_len, 0, limits_.max_context);
  check_count("num_logprobs", sampling.num_logprobs, -1, GLM_MAX_LOGPROBS);
  check_count("num_stop_ids", sampling.num_stop_ids, 0, GLM_MAX_STOP_IDS);
  check_count("num_bias", sampling.num_bias, 0, GLM_MAX_LOGIT_BIAS);
  check_tokens("sampling.stop_ids", sampling.stop_ids, sampling.num_stop_ids, vocab_);
  check_tokens("sampling.bias_ids", sampling.bias_ids, sampling.num_bias, vocab_);
  for (int32_t i = 0; i < sampling.num_bias; ++i) {
    check_float("bias_values", sampling.bias_values[i], -kLargest, kLargest);
  }
  check_tokens("prompt", prompt, num_prompt, vocab_);
  check_tokens("sampled", sampled, num_sampled, vocab_);
}

}  // namespace glm
