#include <algorithm>
#include <cmath>
#include <limits>

#include "device.h"
#include "kept_tile.h"
#include "matmul.h"
#include "ops.h"
#include "workspace.h"

GLM_CPU_BEGIN

namespace {

constexpr int64_t kRowsPerChunk = 8;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Scratch {
  Scratch(std::byte* base, const glm_device* device, const glm_moe_route_args* args)
      : layout(base),
        kept(layout, device->pool.num_threads(), args->x.cols),
        pitch(static_cast<size_t>((args->experts + 15) / 16 * 16)) {
    x = layout.take<float>(activation_floats(args->rows, args->x.cols));
    scores = layout.take<float>(args->rows * pitch);
    choices = layout.take<float>(device->pool.num_threads() * pitch);
    group_scores = layout.take<float>(device->pool.num_threads() * pitch);
    logits = layout.take<float>(static_cast<size_t>(device->pool.num_threads()) * kMatmulOutFloats);
  }
  WorkspaceLayout layout;
  KeptWeights kept;
  size_t pitch;
  float* x;
  float* scores;       /* [rows][pitch] */
  float* choices;      /* [threads][pitch] */
  float* group_scores; /* likewise */
  float* logits;       /* one block a thread */
};

void compute_logits(glm_device* device, const glm_moe_route_args* args, const Scratch& scratch) {
  const Activations x = load_activations(device->pool, nullptr, args->rows, args->x, {}, scratch.x);
  const WeightMatrix matrix{args->weight, args->format, args->x.cols};
  const int32_t block =
      matmul_row_block(args->format, args->experts, args->x.cols, 1, args->rows, device->pool.num_threads());
  parallel_for(device->pool, args->experts, block, [&](int64_t begin, int64_t end, int thread) {
    float* logits = scratch.logits + static_cast<size_t>(thread) * kMatmulOutFloats;
    for (int64_t first = begin; first < end; first += block) {
      const auto experts = static_cast<int32_t>(std::min<int64_t>(block, end - first));
      const auto row = static_cast<int32_t>(first);
      const WeightRows w{matrix, row, experts, matrix.row(row + experts)};
      for (int64_t t = 0; t < args->rows; t += kMatmulTokens) {
        const auto tokens = static_cast<int32_t>(std::min<int64_t>(kMatmulTokens, args->rows - t));
        matmul(w, x, {nullptr, 1}, t, tokens, logits, scratch.kept.of(thread));
        for (int32_t i = 0; i < tokens; ++i) {
          std::copy_n(logits + i * experts, experts, scratch.scores + (t + i) * scratch.pitch + first);
        }
      }
    }
  });
}

/* The largest untaken choice, ties to the lower index; it is then taken (its value becomes NaN). */
int32_t take_best(float* choices, int32_t n) {
  int32_t best = -1;
  for (int32_t i = 0; i < n; ++i) {
    if (std::isnan(choices[i])) continue;
    if (best < 0 || choices[i] > choices[best]) best = i;
  }
  choices[best] = std::numeric_limits<float>::quiet_NaN();
  return best;
}

/* Takes all experts of all groups but the topk_groups best. */
void drop_groups(const glm_moe_route_args* args, float* choices, float* group_scores) {
  const int32_t size = args->experts / args->groups;
  for (int32_t g = 0; g < args->groups; ++g) {
    float first = kMinusInfinity;
    float second = size > 1 ? kMinusInfinity : 0.0f;
    for (int32_t i = 0; i < size; ++i) {
      const float choice = choices[g * size + i];
      if (choice > first) {
        second = size > 1 ? first : 0.0f;
        first = choice;
      } else if (choice > second) {
        second = choice;
      }
    }
    group_scores[g] = first + second;
  }
  for (int32_t kept = 0; kept < args->topk_groups; ++kept) take_best(group_scores, args->groups);
  for (int32_t g = 0; g < args->groups; ++g) {
    if (!std::isnan(group_scores[g])) std::fill_n(choices + g * size, size, std::numeric_limits<float>::quiet_NaN());
  }
}

void route_row(const glm_moe_route_args* args, int64_t row, float* scores, float* choices, float* group_scores) {
  for (int32_t e = 0; e < args->experts; ++e) {
    scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    const float choice = args->bias == nullptr ? scores[e] : scores[e] + args->bias[e];
    choices[e] = std::isnan(choice) ? kMinusInfinity : choice; /* so that top_k distinct experts are always found */
  }
  if (args->groups > 1) drop_groups(args, choices, group_scores);
  auto* ids = static_cast<int32_t*>(row_of(args->ids, row));
  auto* weights = static_cast<float*>(row_of(args->weights, row));
  float total = 0.0f;
  for (int32_t j = 0; j < args->top_k; ++j) {
    const int32_t expert = take_best(choices, args->experts);
    ids[j] = args->places == nullptr ? expert : args->places[expert];
    weights[j] = scores[expert];
    total += weights[j];
  }
  for (int32_t j = 0; j < args->top_k; ++j) {
    if (args->normalize != 0) weights[j] /= total + 1e-20f;
    weights[j] *= args->scale;
  }
}

}  // namespace

size_t moe_route_workspace(const glm_device* device, const glm_moe_route_args* args) {
  return Scratch(nullptr, device, args).layout.bytes();
}

glm_status moe_route(glm_device* device, const glm_moe_route_args* args) {
  if (args->rows == 0) return GLM_OK;
  const Scratch scratch(device->workspace, device, args);
  compute_logits(device, args, scratch);
  parallel_for(device->pool, args->rows, kRowsPerChunk, [&](int64_t begin, int64_t end, int thread) {
    const size_t own = static_cast<size_t>(thread) * scratch.pitch;
    for (int64_t row = begin; row < end; ++row) {
      route_row(args, row, scratch.scores + row * scratch.pitch, scratch.choices + own, scratch.group_scores + own);
    }
  });
  return GLM_OK;
}

GLM_CPU_END
