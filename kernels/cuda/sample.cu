/* Two blocks a sample: each step is a sweep over their shares of its vocabulary. */
#include "launch.h"
#include "numeric.cuh"
#include "ops.h"
#include "sample_draw.cuh"
#include "sample_logprobs.cuh"

namespace glm::cuda {

namespace {

namespace cg = cooperative_groups;

struct SampleParams {
  glm_step_inputs step;
  glm_slots slots;
  glm_tensor logits;
  int32_t first;
  float* raw; /* [rows][vocab]: the model's logits of samples that report log-probabilities */
};

struct SampleShared {
  ClusterShared cluster;
  CutShared cut;
  RawStats raw;
};

__device__ __forceinline__ bool has_penalty(const glm_sampling& request) {
  return request.repetition_penalty != 1.0f || request.frequency_penalty != 0.0f || request.presence_penalty != 0.0f;
}

/* Bits of `count` as glm_slots states them. */
__device__ __forceinline__ float penalized(const glm_sampling& request, float logit, uint16_t count) {
  const int32_t times = count & 0x7fff;
  const float repeated = logit > 0.0f ? logit / request.repetition_penalty : logit * request.repetition_penalty;
  float changed = count != 0 ? repeated : logit;
  changed -= request.frequency_penalty * static_cast<float>(times);
  return changed - (times != 0 ? request.presence_penalty : 0.0f);
}

/* Step 1 of glm_sample_args. A request names a biased token once. */
__device__ void change_logits(const glm_sampling& request, const uint16_t* counts, int32_t sampled,
                              const SampleRow& share) {
  if (has_penalty(request)) {
    for_each_four(share, [&](int32_t first, float values[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < share.end) values[i] = penalized(request, values[i], counts[first + i]);
      }
      store_four(share, first, values);
    });
    __syncthreads();
  }
  const auto at = static_cast<int32_t>(threadIdx.x);
  const auto is_own = [&](int32_t id) { return id >= share.begin && id < share.end; };
  if (at < request.num_bias && is_own(request.bias_ids[at]))
    share.logits[request.bias_ids[at]] += request.bias_values[at];
  __syncthreads();
  const bool masks = sampled < request.min_tokens && at < request.num_stop_ids;
  if (masks && is_own(request.stop_ids[at])) share.logits[request.stop_ids[at]] = kNever;
  __syncthreads();
}

/* Divides by the temperature (0: leaves the logits). Returns the largest value, with no id. */
__device__ uint64_t apply_temperature(float temperature, const SampleRow& share) {
  const bool divides = temperature != 0.0f && temperature != 1.0f;
  float max = kNever;
  for_each_four(share, [&](int32_t first, float values[4]) {
    if (divides) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = values[i] / temperature;
      store_four(share, first, values);
    }
    max = fmaxf(max, fmaxf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3])));
  });
  return rank_of(max, kLastId);
}

__device__ uint64_t best_rank(float max, const SampleRow& share) {
  uint32_t id = kLastId;
  for_each_token(share,
                 [&](float value, int32_t token) { id = value == max ? min(id, static_cast<uint32_t>(token)) : id; });
  return id == kLastId ? 0 : rank_of(max, id);
}

/* Steps 2 and 3: a rank whose id is the token. */
__device__ uint64_t draw(const glm_sampling& request, uint32_t position, float max, const SampleRow& whole,
                         const SampleRow& share, SampleShared& shared) {
  auto cluster = cg::this_cluster();
  Bound kept{kNever, 0}; /* top-k */
  if (request.top_k > 0 && request.top_k < whole.end - whole.begin) {
    if (cluster.block_rank() == 0) {
      const uint64_t found = rank_of_nth(whole, static_cast<uint32_t>(request.top_k), max, shared.cut);
      if (threadIdx.x == 0) shared.cluster.rank = found;
    }
    cluster.sync();
    const uint64_t cut = *cluster.map_shared_rank(&shared.cluster.rank, 0);
    if (cut != 0) kept = {value_of(cut), id_of(cut) + 1};
    cluster.sync();
  }
  Bound bound = kept;
  if (request.min_p > 0.0f) {
    const auto lowest = static_cast<float>(max + log(static_cast<double>(request.min_p)));
    if (lowest > bound.value) bound = {lowest, kLastId};
  }
  for (;;) {
    const uint64_t drawn = cluster_max_rank(draw_noisy(share, request.seed, position, bound), shared.cluster);
    if (request.top_p >= 1.0f || drawn == 0) return drawn;
    const Bound token{whole.logits[id_of(drawn)], id_of(drawn)};
    const float2 weight = cluster_sum(weigh(share, max, token, kept), shared.cluster);
    if (static_cast<double>(weight.x) < static_cast<double>(request.top_p) * static_cast<double>(weight.y))
      return drawn;
    bound = token;
  }
}

/* Keeps the model's logits, their normaliser and best tokens. */
__device__ void record_raw(const SampleRow& row, int32_t wanted, float* raw, SampleShared& shared) {
  float best = kNever;
  for_each_token(row, [&](float value, int32_t id) {
    raw[id] = value;
    best = fmaxf(best, value);
  });
  const float max = value_of(block_max_rank(rank_of(best, kLastId), shared.cluster.warps));
  if (max == kNever) return;
  const double normalizer = log_normalizer(row, max, shared.cluster.sums);
  if (threadIdx.x == 0) shared.raw.normalizer = normalizer;
  if (wanted > 0) find_top(row, max, wanted, shared.cut, shared.raw);
}

__device__ void write_logprobs(const SampleParams& p, int64_t sample, int32_t wanted, int32_t token, const float* raw,
                               const RawStats& stats) {
  const auto at = static_cast<int32_t>(threadIdx.x);
  if (at == 0) p.step.out_logprobs[sample] = static_cast<float>(raw[token] - stats.normalizer);
  if (at < wanted) {
    p.step.out_top_ids[sample * GLM_MAX_LOGPROBS + at] = stats.ids[at];
    p.step.out_top_logprobs[sample * GLM_MAX_LOGPROBS + at] = static_cast<float>(stats.values[at] - stats.normalizer);
  }
}

/* The chosen token's rank, the same in both blocks; 0 if no token is possible. */
__device__ uint64_t choose(const glm_sampling& request, const uint16_t* counts, int32_t position,
                           const SampleRow& whole, SampleShared& shared) {
  const SampleRow share = share_of(whole, static_cast<int>(cg::this_cluster().block_rank()));
  change_logits(request, counts, position - request.prompt_len, share);
  const float max = value_of(cluster_max_rank(apply_temperature(request.temperature, share), shared.cluster));
  if (max == kNever) return 0;
  if (request.temperature == 0.0f) return cluster_max_rank(best_rank(max, share), shared.cluster);
  return draw(request, static_cast<uint32_t>(position), max, whole, share, shared);
}

__global__ void __launch_bounds__(kSampleThreads) sample_kernel(const __grid_constant__ SampleParams p) {
  __shared__ SampleShared shared;
  begin_kernel();
  const int64_t sample = blockIdx.x / kSampleBlocks;
  const bool leads = cg::this_cluster().block_rank() == 0;
  const int32_t slot = p.step.sample_slots[sample];
  const glm_sampling& request = p.slots.sampling[slot];
  const int32_t position = p.step.positions[p.step.sample_rows[sample]] + 1;
  uint16_t* counts = p.slots.counts + static_cast<int64_t>(slot) * p.slots.vocab;
  /* Both rows are indexed by token id. */
  float* logits = row_of<float>(p.logits, sample) - p.first;
  float* raw = p.raw + sample * p.logits.cols - p.first;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % sizeof(float4) == 0;
  const SampleRow whole{logits, p.first, p.first + p.logits.cols, aligned};
  if (request.num_logprobs >= 0) {
    if (leads) record_raw(whole, request.num_logprobs, raw, shared);
    cg::this_cluster().sync();
  }
  const uint64_t chosen = choose(request, counts, position, whole, shared);
  if (!leads) return;
  const int32_t token = chosen == 0 ? -1 : static_cast<int32_t>(id_of(chosen));
  if (threadIdx.x == 0) p.step.out_token_ids[sample] = token;
  if (token < 0) return;
  if (request.num_logprobs >= 0) write_logprobs(p, sample, request.num_logprobs, token, raw, shared.raw);
  if (threadIdx.x == 0) {
    p.slots.last_token[slot] = token;
    if ((counts[token] & 0x7fff) != 0x7fff) ++counts[token];
  }
}

}  // namespace

size_t sample_workspace(const glm_sample_args* args) {
  return static_cast<size_t>(args->rows) * args->logits.cols * sizeof(float);
}

glm_status sample(glm_device* device, const glm_sample_args* args) {
  const SampleParams p{*args->step, *args->slots, args->logits, args->first,
                       reinterpret_cast<float*>(device->workspace)};
  const Grid grid{dim3(static_cast<unsigned>(args->rows) * kSampleBlocks), kSampleThreads, 0, kSampleBlocks};
  return launch(device, "sample", grid, sample_kernel, p);
}

}  // namespace glm::cuda
