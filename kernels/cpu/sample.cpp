/* Sampling in passes over (sample, chunk of the vocabulary). Chunks have a fixed size and are combined in order, so a
 * token depends neither on the other samples nor on the number of threads. */
#include "device.h"
#include "ops.h"
#include "sample_draw.h"
#include "sample_logits.h"
#include "tensor_access.h"
#include "workspace.h"

GLM_CPU_BEGIN

namespace {

constexpr int32_t kChunk = 32 * kBlock;

struct ChunkResult {
  Choice best;  /* of the changed logits */
  Choice drawn; /* with noise */
  Bands bands;
  RawStats raw;
};

struct SampleResult {
  Choice best;
  Cut cut;
};

/* Sizes, and the scratch of every sample. */
struct Work {
  Work(std::byte* base, const glm_sample_args& args)
      : columns(args.logits.cols), chunks((columns + kChunk - 1) / kChunk), layout(base) {
    const auto n = static_cast<size_t>(args.rows);
    samples = layout.take<SampleResult>(n);
    results = layout.take<ChunkResult>(n * chunks);
    block_max = layout.take<float>(n * chunks * (kChunk / kBlock));
    raw_logits = layout.take<float>(n * columns);
  }

  ChunkResult* results_of(int64_t sample) const { return results + sample * chunks; }
  float* block_max_of(int64_t sample) const { return block_max + sample * chunks * (kChunk / kBlock); }
  float* raw_of(int64_t sample) const { return raw_logits + sample * columns; }

  int32_t columns;
  int32_t chunks;
  WorkspaceLayout layout;
  SampleResult* samples;
  ChunkResult* results;
  float* block_max;
  float* raw_logits; /* the model's own, of samples that report log-probabilities */
};

/* One sample's inputs. */
struct Request {
  Request(const glm_sample_args& args, int64_t sample)
      : slot(args.step->sample_slots[sample]),
        sampling(args.slots->sampling[slot]),
        position(args.step->positions[args.step->sample_rows[sample]] + 1),
        first(args.first),
        logits(static_cast<float*>(row_of(args.logits, sample))),
        counts(args.slots->counts + int64_t{slot} * args.slots->vocab + first) {}

  bool greedy() const { return sampling.temperature == 0.0f; }

  int32_t slot;
  const glm_sampling& sampling;
  int32_t position; /* of the token being sampled */
  int32_t first;    /* id of column 0 */
  float* logits;
  uint16_t* counts;
};

LogitSpan span_of(const Request& request, const Work& work, int32_t chunk) {
  const int32_t column = chunk * kChunk;
  return {request.logits + column, request.counts + column, request.first + column, column,
          std::min(kChunk, work.columns - column)};
}

/* block(values, first id, index of the block) for each block of a chunk. */
template <typename Body>
void for_each_block(const LogitSpan& span, Body body) {
  float room[kBlock];
  for (int32_t i = 0; i < span.size; i += kBlock) {
    body(whole_block(span.logits + i, std::min(kBlock, span.size - i), room), span.first + i,
         (span.column + i) / kBlock);
  }
}

/* First pass: the model's log-probabilities, the request's changes, the best token. */
void prepare_chunk(const Request& request, const Work& work, int64_t sample, int32_t chunk) {
  const LogitSpan span = span_of(request, work, chunk);
  ChunkResult& result = work.results_of(sample)[chunk];
  result = {};
  if (request.sampling.num_logprobs >= 0) {
    result.raw = raw_stats(span, request.sampling.num_logprobs);
    std::memcpy(work.raw_of(sample) + span.column, span.logits, static_cast<size_t>(span.size) * sizeof(float));
  }
  change_logits(request.sampling, request.position - request.sampling.prompt_len, span);
  if (!request.greedy()) apply_temperature(request.sampling.temperature, span);
  for_each_block(span, [&](const float* block, int32_t first, int32_t index) {
    const float max = block_max(block);
    work.block_max_of(sample)[index] = max;
    if (max > result.best.value) result.best = {max, first + find_in_block(block, max)};
  });
}

void measure_chunk(const Request& request, const Work& work, int64_t sample, int32_t chunk) {
  if (request.greedy() || !needs_bands(request.sampling)) return;
  Bands& bands = work.results_of(sample)[chunk].bands;
  const float max = work.samples[sample].best.value;
  for_each_block(span_of(request, work, chunk),
                 [&](const float* block, int32_t, int32_t) { add_to_bands(block, max, &bands); });
}

void cut_sample(const Request& request, const Work& work, int64_t sample) {
  SampleResult& result = work.samples[sample];
  if (request.greedy() || result.best.id < 0) return;
  Bands bands;
  for (int32_t chunk = 0; chunk < work.chunks; ++chunk) bands.add(work.results_of(sample)[chunk].bands);
  const Distribution values{request.logits, work.block_max_of(sample), work.columns, request.first, result.best.value};
  result.cut = find_cut(request.sampling, values, bands);
}

void draw_chunk(const Request& request, const Work& work, int64_t sample, int32_t chunk) {
  if (request.greedy()) return;
  const Cut& cut = work.samples[sample].cut;
  const NoiseKey key{request.sampling.seed, static_cast<uint32_t>(request.position)};
  Choice& drawn = work.results_of(sample)[chunk].drawn;
  for_each_block(span_of(request, work, chunk), [&](const float* block, int32_t first, int32_t index) {
    if (work.block_max_of(sample)[index] < cut.value) return; /* nothing kept */
    draw_block(block, first, key, cut, &drawn);
  });
}

/* The best over chunks, in order: ties stay with the lower id. */
Choice best_of(const Work& work, int64_t sample, Choice ChunkResult::* member) {
  Choice best;
  for (int32_t chunk = 0; chunk < work.chunks; ++chunk) {
    const Choice& choice = work.results_of(sample)[chunk].*member;
    if (choice.value > best.value) best = choice;
  }
  return best;
}

void write_logprobs(const glm_sample_args& args, const Request& request, const Work& work, int64_t sample,
                    int32_t token) {
  const int32_t wanted = request.sampling.num_logprobs;
  const ChunkResult* results = work.results_of(sample);
  float max = kNever;
  for (int32_t chunk = 0; chunk < work.chunks; ++chunk)
    max = results[chunk].raw.max > max ? results[chunk].raw.max : max;
  double sum = 0.0;
  TopList top;
  for (int32_t chunk = 0; chunk < work.chunks; ++chunk) {
    const RawStats& raw = results[chunk].raw;
    sum += raw.sum * exp_below(raw.max, max);
    for (int32_t i = 0; i < raw.top.size; ++i) top.insert(raw.top.best[i], wanted);
  }
  const double normalizer = max + std::log(sum);
  args.step->out_logprobs[sample] = static_cast<float>(work.raw_of(sample)[token - request.first] - normalizer);
  for (int32_t i = 0; i < wanted; ++i) {
    const Choice choice = i < top.size ? top.best[i] : Choice{};
    args.step->out_top_ids[sample * GLM_MAX_LOGPROBS + i] = choice.id;
    args.step->out_top_logprobs[sample * GLM_MAX_LOGPROBS + i] = static_cast<float>(choice.value - normalizer);
  }
}

void finish_sample(const glm_sample_args& args, const Work& work, int64_t sample) {
  const Request request(args, sample);
  const Choice best = work.samples[sample].best;
  const int32_t token = request.greedy() || best.id < 0 ? best.id : best_of(work, sample, &ChunkResult::drawn).id;
  args.step->out_token_ids[sample] = token;
  if (token < 0) return;
  if (request.sampling.num_logprobs >= 0) write_logprobs(args, request, work, sample, token);
  args.slots->last_token[request.slot] = token;
  uint16_t& count = request.counts[token - request.first];
  if ((count & 0x7fffu) != 0x7fffu) ++count;
}

}  // namespace

size_t sample_workspace(const glm_device*, const glm_sample_args* args) {
  return Work(nullptr, *args).layout.bytes();
}

glm_status sample(glm_device* device, const glm_sample_args* args) {
  const Work work(device->workspace, *args);
  const auto for_chunks = [&](auto pass) {
    parallel_for(device->pool, int64_t{args->rows} * work.chunks, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t sample = i / work.chunks;
        pass(Request(*args, sample), work, sample, static_cast<int32_t>(i % work.chunks));
      }
    });
  };
  for_chunks(prepare_chunk);
  bool noisy = false;
  for (int64_t i = 0; i < args->rows; ++i) {
    work.samples[i] = {best_of(work, i, &ChunkResult::best), {}};
    noisy = noisy || !Request(*args, i).greedy();
  }
  if (noisy) {
    for_chunks(measure_chunk);
    parallel_for(device->pool, args->rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) cut_sample(Request(*args, i), work, i);
    });
    for_chunks(draw_chunk);
  }
  for (int64_t i = 0; i < args->rows; ++i) finish_sample(*args, work, i);
  return GLM_OK;
}

GLM_CPU_END
