/* Two blocks a sample: each step is a sweep over their shares of its vocabulary, and, with several ranks, an exchange of what
 * they found. */
#include <algorithm>

#include "collective.h"
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
  int32_t begin; /* the first sample of this launch */
  float* raw;    /* [rows][columns]: the model's logits of samples that report log-probabilities */
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

/* Tokens that `mask` does not have become -inf. Four at a time: their first id is a multiple of 4, so one word has all. */
__device__ void apply_mask(const uint32_t* mask, const SampleRow& share) {
  for_each_four(share, [&](int32_t first, float values[4]) {
    const uint32_t bits = mask[first / 32] >> (first % 32) & 0xfu;
    if (bits == 0xfu) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = (bits >> i & 1) != 0 ? values[i] : kNever;
    store_four(share, first, values);
  });
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

/* The best noisy token of all ranks above the bound, and its value without noise. 0 if there is none. */
template <typename AnyLane>
__device__ uint64_t draw_once(const glm_sampling& request, uint32_t position, const SampleRow& share,
                              const Bound& bound, const SampleRow& whole, float* value, SampleShared& shared,
                              AnyLane& lane) {
  const uint64_t own = cluster_max_rank(draw_noisy(share, request.seed, position, bound), shared.cluster);
  uint64_t words[2] = {own, own == 0 ? 0 : __float_as_uint(whole.logits[id_of(own)])};
  largest_of_ranks(words, lane, shared.cluster);
  *value = __uint_as_float(static_cast<uint32_t>(words[1]));
  return words[0];
}

/* What top-k keeps. */
template <typename AnyLane>
__device__ Bound top_k_bound(int32_t top_k, float max, const SampleRow& whole, SampleShared& shared, AnyLane& lane) {
  auto cluster = cg::this_cluster();
  if (cluster.block_rank() == 0) {
    const uint64_t found = rank_of_nth(whole, static_cast<uint32_t>(top_k), max, shared.cut, lane);
    if (threadIdx.x == 0) shared.cluster.rank = found;
  }
  cluster.sync();
  const uint64_t cut = *cluster.map_shared_rank(&shared.cluster.rank, 0);
  cluster.sync();
  if (cut == 0) return {kNever, 0};
  return {value_of(cut), id_of(cut) + 1};
}

/* Steps 2 and 3: a rank whose id is the token. `vocab`: of all ranks. */
template <typename AnyLane>
__device__ uint64_t draw(const glm_sampling& request, uint32_t position, float max, int32_t vocab,
                         const SampleRow& whole, const SampleRow& share, SampleShared& shared, AnyLane& lane) {
  Bound kept{kNever, 0};
  if (request.top_k > 0 && request.top_k < vocab) kept = top_k_bound(request.top_k, max, whole, shared, lane);
  Bound bound = kept;
  if (request.min_p > 0.0f) {
    const auto lowest = static_cast<float>(max + log(static_cast<double>(request.min_p)));
    if (lowest > bound.value) bound = {lowest, kLastId};
  }
  for (;;) {
    float value = 0.0f;
    const uint64_t drawn = draw_once(request, position, share, bound, whole, &value, shared, lane);
    if (request.top_p >= 1.0f || drawn == 0) return drawn;
    const Bound token{value, id_of(drawn)};
    const float2 own = cluster_sum(weigh(share, max, token, kept), shared.cluster);
    const float2 weight = sum_of_ranks(own, lane, shared.cluster);
    if (is_lost(lane, shared.cluster)) return 0;
    if (static_cast<double>(weight.x) < static_cast<double>(request.top_p) * static_cast<double>(weight.y))
      return drawn;
    bound = token;
  }
}

/* Keeps the model's logits, their normaliser and best tokens. By the first block of a cluster. */
template <typename AnyLane>
__device__ void record_raw(const SampleRow& row, int32_t wanted, float* raw, SampleShared& shared, AnyLane& lane) {
  float best = kNever;
  for_each_token(row, [&](float value, int32_t id) {
    raw[id] = value;
    best = fmaxf(best, value);
  });
  const float max = value_of(block_max_rank(rank_of(best, kLastId), shared.cluster.warps));
  const float weight = weight_of(row, max, shared.cluster.sums);
  const double normalizer = log_normalizer(max, weight, lane, shared.cluster.words);
  if (threadIdx.x == 0) shared.raw.normalizer = normalizer;
  if (wanted > 0) find_top(row, max, wanted, shared.cut, shared.raw, lane);
}

/* The model's logit of the token, which one of the ranks has. By the first block of a cluster. */
template <typename AnyLane>
__device__ float raw_logit(int32_t token, const SampleRow& row, const float* raw, SampleShared& shared, AnyLane& lane) {
  const bool is_own = token >= row.begin && token < row.end;
  const uint64_t own = is_own ? uint64_t{1} << 32 | __float_as_uint(raw[token]) : 0;
  if (lane.alone()) return __uint_as_float(static_cast<uint32_t>(own));
  lane.gather({own}, shared.cluster.words);
  uint64_t found = 0;
  for (int peer = 0; peer < lane.num_ranks(); ++peer) found = max(found, shared.cluster.words[0][peer]);
  return __uint_as_float(static_cast<uint32_t>(found));
}

__device__ void write_logprobs(const SampleParams& p, int64_t sample, int32_t wanted, float logit,
                               const RawStats& stats) {
  const auto at = static_cast<int32_t>(threadIdx.x);
  if (at == 0) p.step.out_logprobs[sample] = static_cast<float>(logit - stats.normalizer);
  if (at < wanted) {
    p.step.out_top_ids[sample * GLM_MAX_LOGPROBS + at] = stats.ids[at];
    p.step.out_top_logprobs[sample * GLM_MAX_LOGPROBS + at] = static_cast<float>(stats.values[at] - stats.normalizer);
  }
}

/* The chosen token's rank, the same in both blocks and on all ranks; 0 if no token is possible. */
template <typename AnyLane>
__device__ uint64_t choose(const SampleParams& p, int64_t sample, int32_t slot, int32_t position,
                           const SampleRow& whole, SampleShared& shared, AnyLane& lane) {
  const glm_sampling& request = p.slots.sampling[slot];
  const uint16_t* counts = p.slots.counts + static_cast<int64_t>(slot) * p.slots.vocab;
  const SampleRow share = share_of(whole, static_cast<int>(cg::this_cluster().block_rank()));
  change_logits(request, counts, position - request.prompt_len, share);
  if (const int32_t mask = p.step.sample_masks[sample]; mask >= 0) {
    apply_mask(p.step.masks + static_cast<int64_t>(mask) * ((p.slots.vocab + 31) / 32), share);
  }
  uint64_t best[1] = {cluster_max_rank(apply_temperature(request.temperature, share), shared.cluster)};
  if (request.temperature == 0.0f) {
    const float own = value_of(best[0]);
    best[0] = cluster_max_rank(own == kNever ? 0 : best_rank(own, share), shared.cluster);
    largest_of_ranks(best, lane, shared.cluster);
    return best[0];
  }
  largest_of_ranks(best, lane, shared.cluster);
  const float max = value_of(best[0]);
  if (max == kNever || is_lost(lane, shared.cluster)) return 0;
  const int32_t vocab = lane.alone() ? p.logits.cols : p.slots.vocab;
  return draw(request, static_cast<uint32_t>(position), max, vocab, whole, share, shared, lane);
}

__device__ void update_slot(const SampleParams& p, int32_t slot, int32_t token) {
  p.slots.last_token[slot] = token;
  uint16_t& count = p.slots.counts[static_cast<int64_t>(slot) * p.slots.vocab + token];
  if ((count & 0x7fff) != 0x7fff) ++count;
}

template <bool kAlone>
__device__ auto lane_of(const Peers& peers, int place) {
  if constexpr (kAlone) {
    return NoLane{};
  } else {
    return Lane(peers, place);
  }
}

template <bool kAlone>
__global__ void __launch_bounds__(kSampleThreads)
    sample_kernel(const __grid_constant__ Peers peers, const __grid_constant__ SampleParams p) {
  __shared__ SampleShared shared;
  if (threadIdx.x == 0) shared.cluster.lost = 0;
  begin_kernel();
  const auto place = static_cast<int>(blockIdx.x / kSampleBlocks);
  const int64_t sample = p.begin + place;
  auto lane = lane_of<kAlone>(peers, place);
  if constexpr (!kAlone) {
    if (p.begin == 0 && blockIdx.x == 0 && threadIdx.x == 0) count_exchange(peers);
  }
  const bool leads = cg::this_cluster().block_rank() == 0;
  const int32_t slot = p.step.sample_slots[sample];
  const int32_t position = p.step.positions[p.step.sample_rows[sample]] + 1;
  const int32_t wanted = p.slots.sampling[slot].num_logprobs;
  /* Both rows are indexed by token id. */
  float* logits = row_of<float>(p.logits, sample) - p.first;
  float* raw = p.raw + sample * p.logits.cols - p.first;
  const bool aligned = reinterpret_cast<uintptr_t>(logits) % sizeof(float4) == 0;
  const SampleRow whole{logits, p.first, p.first + p.logits.cols, aligned};
  if (wanted >= 0) {
    if (leads) record_raw(whole, wanted, raw, shared, lane);
    cg::this_cluster().sync();
  }
  const int32_t forced = p.step.forced_tokens[sample];
  int32_t token = forced;
  if (forced < 0) {
    const uint64_t chosen = choose(p, sample, slot, position, whole, shared, lane);
    token = chosen == 0 ? -1 : static_cast<int32_t>(id_of(chosen));
  }
  if (!leads) return;
  if (token >= 0 && wanted >= 0) {
    write_logprobs(p, sample, wanted, raw_logit(token, whole, raw, shared, lane), shared.raw);
  }
  if (threadIdx.x == 0) {
    p.step.out_token_ids[sample] = token;
    if (token >= 0 && forced < 0) update_slot(p, slot, token);
  }
  lane.close();
}

}  // namespace

size_t sample_workspace(const glm_sample_args* args) {
  return static_cast<size_t>(args->rows) * args->logits.cols * sizeof(float);
}

glm_status sample(glm_device* device, const glm_sample_args* args) {
  if (const glm_status status = check_group(device); status != GLM_OK) return status;
  const bool alone = args->logits.cols == args->slots->vocab || device->peers.num_ranks == 1;
  const auto kernel = alone ? sample_kernel<true> : sample_kernel<false>;
  SampleParams p{*args->step, *args->slots, args->logits, args->first, 0, reinterpret_cast<float*>(device->workspace)};
  for (; p.begin < args->rows; p.begin += kLanes) {
    const int32_t samples = std::min(kLanes, args->rows - p.begin);
    const Grid grid{dim3(static_cast<unsigned>(samples) * kSampleBlocks), kSampleThreads, 0, kSampleBlocks};
    if (const glm_status status = launch(device, "sample", grid, kernel, device->peers, p); status != GLM_OK) {
      return status;
    }
  }
  return GLM_OK;
}

}  // namespace glm::cuda
