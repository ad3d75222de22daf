/* Sampling in passes over (sample, chunk of the vocabulary). Chunks have a fixed size and are combined in order, so a
 * token depends neither on the other samples nor on the number of threads. Between passes, ranks that have other parts of
 * the vocabulary combine their results. */
#include "device.h"
#include "exchange.h"
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

/* Of this rank's part of the vocabulary, or of all ranks. */
struct SampleResult {
  Choice best;
  Bands bands;
  Cut cut;
  Choice drawn;
  RawStats raw;
  float raw_logit = kNever; /* of the token; never: another rank's */
};

/* Sizes, and the scratch of every sample. */
struct Work {
  Work(std::byte* base, const glm_device* device, const glm_sample_args& args)
      : columns(args.logits.cols), chunks((columns + kChunk - 1) / kChunk), layout(base) {
    const auto n = static_cast<size_t>(args.rows);
    own = layout.take<SampleResult>(n);
    samples = layout.take<SampleResult>(n);
    results = layout.take<ChunkResult>(n * chunks);
    block_max = layout.take<float>(n * chunks * (kChunk / kBlock));
    raw_logits = layout.take<float>(n * columns);
    candidates = layout.take<float>(static_cast<size_t>(device->pool.num_threads()) * columns);
  }

  ChunkResult* results_of(int64_t sample) const { return results + sample * chunks; }
  float* block_max_of(int64_t sample) const { return block_max + sample * chunks * (kChunk / kBlock); }
  float* raw_of(int64_t sample) const { return raw_logits + sample * columns; }
  float* candidates_of(int thread) const { return candidates + static_cast<int64_t>(thread) * columns; }

  int32_t columns;
  int32_t chunks;
  WorkspaceLayout layout;
  SampleResult* own;     /* of this rank */
  SampleResult* samples; /* of all ranks */
  ChunkResult* results;
  float* block_max;
  float* raw_logits; /* the model's own, of samples that report log-probabilities */
  float* candidates; /* each thread's, of the sample at hand */
};

/* One sample's inputs. */
struct Request {
  Request(const glm_sample_args& args, int64_t sample)
      : slot(args.step->sample_slots[sample]),
        sampling(args.slots->sampling[slot]),
        position(args.step->positions[args.step->sample_rows[sample]] + 1),
        first(args.first),
        forced(args.step->forced_tokens[sample]),
        mask(mask_of(args, args.step->sample_masks[sample])),
        logits(static_cast<float*>(row_of(args.logits, sample))),
        counts(args.slots->counts + int64_t{slot} * args.slots->vocab) {}

  static const uint32_t* mask_of(const glm_sample_args& args, int32_t mask) {
    return mask < 0 ? nullptr : args.step->masks + int64_t{mask} * ((args.slots->vocab + 31) / 32);
  }
  bool is_forced() const { return forced >= 0; }
  bool draws() const { return !is_forced() && sampling.temperature != 0.0f; }

  int32_t slot;
  const glm_sampling& sampling;
  int32_t position; /* of the token being sampled */
  int32_t first;    /* id of column 0 */
  int32_t forced;
  const uint32_t* mask; /* of the whole vocabulary; NULL: any token */
  float* logits;
  uint16_t* counts; /* of the whole vocabulary */
};

LogitSpan span_of(const Request& request, const Work& work, int32_t chunk) {
  const int32_t column = chunk * kChunk;
  return {request.logits + column, request.counts + request.first + column, request.first + column, column,
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
  if (request.is_forced()) return;
  change_logits(request.sampling, request.position - request.sampling.prompt_len, span);
  if (request.mask != nullptr) apply_mask(request.mask, span);
  if (request.draws()) apply_temperature(request.sampling.temperature, span);
  for_each_block(span, [&](const float* block, int32_t first, int32_t index) {
    const float max = block_max(block);
    work.block_max_of(sample)[index] = max;
    if (max > result.best.value) result.best = {max, first + find_in_block(block, max)};
  });
}

void measure_chunk(const Request& request, const Work& work, int64_t sample, int32_t chunk) {
  if (!request.draws() || !needs_bands(request.sampling)) return;
  Bands& bands = work.results_of(sample)[chunk].bands;
  const float max = work.samples[sample].best.value;
  for_each_block(span_of(request, work, chunk),
                 [&](const float* block, int32_t, int32_t) { add_to_bands(block, max, &bands); });
}

void cut_sample(const glm_sample_args& args, const Work& work, int64_t sample, int thread, Exchange& exchange) {
  const Request request(args, sample);
  SampleResult& result = work.samples[sample];
  if (!request.draws() || result.best.id < 0) return;
  const int32_t vocab = exchange.alone() ? work.columns : args.slots->vocab;
  const Distribution values{request.logits,    work.block_max_of(sample), work.columns, request.first, vocab,
                            result.best.value, work.candidates_of(thread)};
  result.cut = find_cut(request.sampling, values, result.bands, exchange);
}

void draw_chunk(const Request& request, const Work& work, int64_t sample, int32_t chunk) {
  if (!request.draws()) return;
  const Cut& cut = work.samples[sample].cut;
  const NoiseKey key{request.sampling.seed, static_cast<uint32_t>(request.position)};
  Choice& drawn = work.results_of(sample)[chunk].drawn;
  for_each_block(span_of(request, work, chunk), [&](const float* block, int32_t first, int32_t index) {
    if (work.block_max_of(sample)[index] < cut.value) return; /* nothing kept */
    draw_block(block, first, key, cut, &drawn);
  });
}

/* merge(result of the chunk, sample) for all chunks in order. */
template <typename Merge>
void for_each_result(const Work& work, int32_t rows, Merge merge) {
  for (int64_t sample = 0; sample < rows; ++sample) {
    for (int32_t chunk = 0; chunk < work.chunks; ++chunk) merge(work.results_of(sample)[chunk], sample);
  }
}

/* merge(what a rank has of the sample, sample) for all ranks in order. */
template <typename Merge>
void for_each_rank(const Work& work, int32_t rows, Exchange& exchange, Merge merge) {
  exchange.each(work.own, [&](const SampleResult* theirs) {
    for (int64_t sample = 0; sample < rows; ++sample) merge(theirs[sample], sample);
  });
}

/* Parts come in order of id: ties stay with the lower one. */
void take_better(const Choice& other, Choice* choice) {
  if (other.value > choice->value) *choice = other;
}

void find_best(const Work& work, int32_t rows, Exchange& exchange) {
  for (int64_t i = 0; i < rows; ++i) work.own[i] = work.samples[i] = {};
  for_each_result(work, rows, [&](const ChunkResult& chunk, int64_t i) { take_better(chunk.best, &work.own[i].best); });
  for_each_rank(work, rows, exchange,
                [&](const SampleResult& rank, int64_t i) { take_better(rank.best, &work.samples[i].best); });
}

void find_bands(const Work& work, int32_t rows, Exchange& exchange) {
  for_each_result(work, rows, [&](const ChunkResult& chunk, int64_t i) { work.own[i].bands.add(chunk.bands); });
  for_each_rank(work, rows, exchange,
                [&](const SampleResult& rank, int64_t i) { work.samples[i].bands.add(rank.bands); });
}

void find_drawn(const Work& work, int32_t rows, Exchange& exchange) {
  for_each_result(work, rows,
                  [&](const ChunkResult& chunk, int64_t i) { take_better(chunk.drawn, &work.own[i].drawn); });
  for_each_rank(work, rows, exchange,
                [&](const SampleResult& rank, int64_t i) { take_better(rank.drawn, &work.samples[i].drawn); });
}

int32_t token_of(const Request& request, const SampleResult& result) {
  if (request.is_forced()) return request.forced;
  return request.draws() && result.best.id >= 0 ? result.drawn.id : result.best.id;
}

/* What log-probabilities take: the model's own logits over the whole vocabulary, and that of the token. */
void find_raw(const glm_sample_args& args, const Work& work, Exchange& exchange) {
  const auto wanted = [&](int64_t i) { return Request(args, i).sampling.num_logprobs; };
  for_each_result(work, args.rows, [&](const ChunkResult& chunk, int64_t i) {
    if (wanted(i) >= 0) add_stats(chunk.raw, wanted(i), &work.own[i].raw);
  });
  for (int64_t i = 0; i < args.rows; ++i) {
    const int32_t column = token_of(Request(args, i), work.samples[i]) - args.first;
    if (column >= 0 && column < work.columns) work.own[i].raw_logit = work.raw_of(i)[column];
  }
  for_each_rank(work, args.rows, exchange, [&](const SampleResult& rank, int64_t i) {
    if (wanted(i) < 0) return;
    add_stats(rank.raw, wanted(i), &work.samples[i].raw);
    if (rank.raw_logit > work.samples[i].raw_logit) work.samples[i].raw_logit = rank.raw_logit;
  });
}

void write_logprobs(const glm_sample_args& args, int32_t wanted, const SampleResult& result, int64_t sample) {
  const double normalizer = result.raw.max + std::log(result.raw.sum);
  args.step->out_logprobs[sample] = static_cast<float>(result.raw_logit - normalizer);
  for (int32_t i = 0; i < wanted; ++i) {
    const Choice choice = i < result.raw.top.size ? result.raw.top.best[i] : Choice{};
    args.step->out_top_ids[sample * GLM_MAX_LOGPROBS + i] = choice.id;
    args.step->out_top_logprobs[sample * GLM_MAX_LOGPROBS + i] = static_cast<float>(choice.value - normalizer);
  }
}

void finish_sample(const glm_sample_args& args, const Work& work, int64_t sample) {
  const Request request(args, sample);
  const int32_t token = token_of(request, work.samples[sample]);
  args.step->out_token_ids[sample] = token;
  if (token < 0) return;
  const int32_t wanted = request.sampling.num_logprobs;
  if (wanted >= 0) write_logprobs(args, wanted, work.samples[sample], sample);
  if (request.is_forced()) return;
  args.slots->last_token[request.slot] = token;
  uint16_t& count = request.counts[token];
  if ((count & 0x7fffu) != 0x7fffu) ++count;
}

/* Steps 2 and 3. */
template <typename ForChunks>
void draw(glm_device* device, const glm_sample_args& args, const Work& work, Exchange& exchange, ForChunks for_chunks) {
  for_chunks(measure_chunk);
  find_bands(work, args.rows, exchange);
  /* The ranks search in lockstep, sample by sample. */
  const int64_t grain = exchange.alone() ? 1 : args.rows;
  parallel_for(device->pool, args.rows, grain, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) cut_sample(args, work, i, thread, exchange);
  });
  for_chunks(draw_chunk);
  find_drawn(work, args.rows, exchange);
}

}  // namespace

size_t sample_workspace(const glm_device* device, const glm_sample_args* args) {
  return Work(nullptr, device, *args).layout.bytes();
}

glm_status sample(glm_device* device, const glm_sample_args* args) {
  const Work work(device->workspace, device, *args);
  Exchange exchange(device);
  const auto for_chunks = [&](auto pass) {
    parallel_for(device->pool, int64_t{args->rows} * work.chunks, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t sample = i / work.chunks;
        pass(Request(*args, sample), work, sample, static_cast<int32_t>(i % work.chunks));
      }
    });
  };
  for_chunks(prepare_chunk);
  find_best(work, args->rows, exchange);
  bool noisy = false;
  bool logprobs = false;
  for (int64_t i = 0; i < args->rows; ++i) {
    const Request request(*args, i);
    noisy = noisy || request.draws();
    logprobs = logprobs || request.sampling.num_logprobs >= 0;
  }
  if (noisy) draw(device, *args, work, exchange, for_chunks);
  if (logprobs) find_raw(*args, work, exchange);
  if (exchange.status() != GLM_OK) return exchange.status();
  for (int64_t i = 0; i < args->rows; ++i) finish_sample(*args, work, i);
  return GLM_OK;
}

GLM_CPU_END
