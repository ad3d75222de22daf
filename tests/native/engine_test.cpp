// The engine's threads and its life cycle, as a program of its own, so that every sanitizer (leaks and data races
// included) sees all of it. The arguments are checked in detail by the Python tests beside it.
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "glm/runtime.h"

namespace {

#define EXPECT(condition)                                                           \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (false)

constexpr int32_t kVocab = 1 << 12;
constexpr int32_t kHidden = 1 << 10;
constexpr int32_t kSlots = 4;
constexpr int32_t kContext = 64;
constexpr int32_t kPages = kSlots * kContext / GLM_PAGE_SIZE;
constexpr uint64_t kWeightBytes = uint64_t{kVocab} * kHidden;

// Of a rank that has its part of the head.
std::string plan(const std::string& name, int32_t rank = 0, int32_t num_ranks = 1) {
  const int32_t first = kVocab / num_ranks * rank;
  const std::string rows = std::to_string(kVocab / num_ranks);
  const std::string range = std::to_string(first) + ":" + std::to_string(first + kVocab / num_ranks);
  return "glmplan 1\nname " + name +
         "\nact f32\nvocab 4096\nkv layers=2 kv_heads=1 head_dim=16 dtype=bf16\n"
         "rope r rotary_dim=8 theta=10000\n"
         "buffer x f32 T 1024\nbuffer q fp8 T 1024\nbuffer qs f32 T 1\nbuffer logits f32 S " +
         rows +
         "\nmatrix table f32 4096 1024\npart tensor=table rows=0:4096 cols=0:1024\n"
         "matrix head fp8_channel " +
         rows + " 1024\npart tensor=head rows=" + range +
         " cols=0:1024 scale=head.scale\n"
         "op embed embed table=table out=x\n" +
         (num_ranks > 1 ? "op all_reduce reduce x=x\n" : "") +
         "op quantize quantize x=x q=q scale=qs\n"
         "op linear head x=q x_scale=qs w=head out=logits" +
         (name == "mixed" ? " rows=S" : "") + "\nop sample sample logits=logits first=" + std::to_string(first) + "\n";
}

struct Checkpoint {
  std::string path;
  std::vector<glm_tensor_source> sources;

  explicit Checkpoint(std::string file) : path(std::move(file)) {
    const std::vector<char> zeros(kWeightBytes * 5 + kVocab * 4);
    std::ofstream(path, std::ios::binary).write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
    sources = {{"table", path.c_str(), 0, kWeightBytes * 4, "F32", 2, {kVocab, kHidden}, 0, 0, 0},
               {"head", path.c_str(), kWeightBytes * 4, kWeightBytes, "F8_E4M3", 2, {kVocab, kHidden}, 0, 0, 0},
               {"head.scale", path.c_str(), kWeightBytes * 5, kVocab * 4, "F32", 2, {kVocab, 1}, 0, 0, 0}};
  }
  ~Checkpoint() { std::remove(path.c_str()); }
};

struct Fixture {
  std::string kernels;
  std::string mixed = plan("mixed");
  std::string decode = plan("decode");
  const Checkpoint& checkpoint;
  std::atomic<uint64_t> reported = 0;
  int32_t num_ranks = 1;  // more: plans of their own
  std::vector<std::string> plans = {};
  std::vector<glm_rank_options> ranks = {};

  glm_engine_options options() {
    glm_engine_options out{};
    out.kernels_path = kernels.c_str();
    out.num_threads = 3;
    make_ranks();
    out.ranks = ranks.data();
    out.num_ranks = num_ranks;
    out.tensors = checkpoint.sources.data();
    out.num_tensors = static_cast<int32_t>(checkpoint.sources.size());
    out.max_rows = 32;
    out.max_samples = kSlots;
    out.max_slots = kSlots;
    out.max_context = kContext;
    out.num_pages = kPages;
    out.progress = [](void* context, uint64_t done, uint64_t) { static_cast<Fixture*>(context)->reported = done; };
    out.progress_context = this;
    return out;
  }

  void make_ranks() {
    plans = {mixed, decode};
    for (int32_t rank = 0; num_ranks > 1 && rank < num_ranks; ++rank) {
      if (rank == 0) plans.clear();
      for (const char* name : {"mixed", "decode"}) plans.push_back(plan(name, rank, num_ranks));
    }
    ranks.clear();
    for (size_t i = 0; i < plans.size(); i += 2) ranks.push_back({0, plans[i].c_str(), plans[i + 1].c_str(), nullptr});
  }

  glm_engine* create() {
    glm_engine* engine = nullptr;
    glm_error error{};
    const glm_engine_options chosen = options();
    if (glm_engine_create(&chosen, &engine, &error) != GLM_OK) std::fprintf(stderr, "%s\n", error.message);
    EXPECT(engine != nullptr);
    return engine;
  }
};

glm_sampling greedy() {
  glm_sampling out{};
  out.top_p = 1;
  out.repetition_penalty = 1;
  out.num_logprobs = -1;
  return out;
}

void bind_all(glm_engine* engine) {
  const glm_sampling sampling = greedy();
  const std::array<int32_t, 3> prompt = {1, 2, 3};
  for (int32_t slot = 0; slot < kSlots; ++slot) {
    EXPECT(glm_engine_bind_slot(engine, slot, &sampling, prompt.data(), 3, nullptr, 0, nullptr) == GLM_OK);
  }
}

// One row of every slot at `position`.
glm_status submit(glm_engine* engine, int32_t position, int32_t token, glm_error* error = nullptr) {
  std::array<int32_t, kSlots> tokens, positions, slots, rows;
  std::array<int32_t, kSlots + 1> starts;
  std::vector<glm_page_update> updates;
  for (int32_t i = 0; i < kSlots; ++i) {
    tokens[i] = token;
    positions[i] = position;
    slots[i] = rows[i] = starts[i] = i;
    const int32_t index = position / GLM_PAGE_SIZE;
    if (position % GLM_PAGE_SIZE == 0) updates.push_back({i, index, i * kContext / GLM_PAGE_SIZE + index});
  }
  starts[kSlots] = kSlots;
  const glm_step_batch batch{.num_rows = kSlots,
                             .num_seqs = kSlots,
                             .num_samples = kSlots,
                             .num_page_updates = static_cast<int32_t>(updates.size()),
                             .plan = GLM_PLAN_DECODE,
                             .token_ids = tokens.data(),
                             .positions = positions.data(),
                             .seq_slots = slots.data(),
                             .seq_starts = starts.data(),
                             .sample_rows = rows.data(),
                             .page_updates = updates.data(),
                             .forced_tokens = nullptr,
                             .sample_masks = nullptr,
                             .num_masks = 0};
  return glm_engine_submit(engine, &batch, error);
}

void collect(glm_engine* engine, int32_t position) {
  glm_step_result result{};
  EXPECT(glm_engine_collect(engine, &result, nullptr) == GLM_OK);
  EXPECT(result.num_samples == kSlots);
  for (int32_t i = 0; i < kSlots; ++i) EXPECT(result.token_ids[i] == position + 1);
}

// Two steps in flight, slots changing hands between them, and a second thread asking for information all along.
void test_pipeline(Fixture& fixture) {
  glm_engine* engine = fixture.create();
  EXPECT(fixture.reported == kWeightBytes * (4 * fixture.num_ranks + 1));
  std::atomic<bool> done = false;
  std::thread observer([&] {
    glm_engine_info info{};
    glm_engine_progress progress{};
    while (!done) {
      EXPECT(glm_engine_get_info(engine, &info, nullptr) == GLM_OK);
      EXPECT(glm_engine_get_progress(engine, &progress, nullptr) == GLM_OK);
    }
  });
  for (int32_t round = 0; round < 50; ++round) {
    bind_all(engine);
    for (int32_t position = 0; position < kContext; ++position) {
      EXPECT(submit(engine, position, position == 0 ? 5 : -1) == GLM_OK);
      if (position > 0) collect(engine, position - 1);
    }
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      EXPECT(glm_engine_release_slot(engine, slot, nullptr) == GLM_OK);
    }
    collect(engine, kContext - 1);
  }
  done = true;
  observer.join();
  glm_engine_destroy(engine);
}

// What a step that fails tells.
std::string collect_failure(glm_engine* engine) {
  glm_step_result result{};
  glm_error error{};
  EXPECT(glm_engine_collect(engine, &result, &error) == GLM_DEVICE_ERROR);
  return error.message;
}

// A rank that fails wakes those that wait for it, and its failure is the one that is told.
void test_rank_failure(Fixture& fixture, void (*fail)(int32_t, int32_t, int32_t), void (*on_rank)(int32_t)) {
  for (int32_t rank = 0; rank < fixture.num_ranks; ++rank) {
    glm_engine* engine = fixture.create();
    bind_all(engine);
    on_rank(rank);
    fail(GLM_OP_EMBED, 1, GLM_DEVICE_ERROR);
    EXPECT(submit(engine, 0, 1) == GLM_OK);
    collect(engine, 0);
    EXPECT(submit(engine, 1, -1) == GLM_OK);
    EXPECT(collect_failure(engine).starts_with("rank " + std::to_string(rank) + ": op embed embed"));
    glm_engine_destroy(engine);
  }
}

// From another thread, while the engine's caller waits.
void test_abort(Fixture& fixture, void (*release)(), void (*hang)(int32_t, int32_t), void (*wait_hanging)(int32_t),
                void (*on_rank)(int32_t)) {
  glm_engine* engine = fixture.create();
  bind_all(engine);
  on_rank(1);
  hang(GLM_OP_QUANTIZE, 0);
  EXPECT(submit(engine, 0, 1) == GLM_OK);
  std::thread watchdog([&] {
    wait_hanging(1);
    glm_engine_progress progress{};
    EXPECT(glm_engine_get_progress(engine, &progress, nullptr) == GLM_OK);
    EXPECT(std::string(progress.where).find("rank 1 in op quantize quantize of step 0") != std::string::npos);
    EXPECT(glm_engine_abort(engine, "given up", nullptr) == GLM_OK);
  });
  EXPECT(collect_failure(engine) == "given up");
  watchdog.join();
  release();
  glm_engine_destroy(engine);
}

void test_destroy_with_steps_in_flight(Fixture& fixture) {
  glm_engine* engine = fixture.create();
  bind_all(engine);
  EXPECT(submit(engine, 0, 1) == GLM_OK);
  EXPECT(submit(engine, 1, -1) == GLM_OK);
  glm_engine_destroy(engine);
}

void test_failure_is_final(Fixture& fixture, void (*fail)(int32_t, int32_t, int32_t)) {
  glm_engine* engine = fixture.create();
  bind_all(engine);
  fail(GLM_OP_LINEAR, 1, GLM_DEVICE_ERROR);
  EXPECT(submit(engine, 0, 1) == GLM_OK);
  collect(engine, 0);
  EXPECT(submit(engine, 1, -1) == GLM_OK);
  EXPECT(collect_failure(engine).find("op linear head") != std::string::npos);
  EXPECT(!collect_failure(engine).empty());
  EXPECT(submit(engine, 2, -1) == GLM_DEVICE_ERROR);
  EXPECT(glm_engine_release_slot(engine, 0, nullptr) == GLM_DEVICE_ERROR);
  glm_engine_destroy(engine);
}

void expect_refused(Fixture& fixture, glm_status status) {
  glm_engine* engine = nullptr;
  glm_error error{};
  const glm_engine_options options = fixture.options();
  EXPECT(glm_engine_create(&options, &engine, &error) == status);
  EXPECT(engine == nullptr && error.message[0] != '\0');
}

// Whatever create had made before it failed is given back.
void test_failed_creation(const Checkpoint& checkpoint, const std::string& kernels) {
  Fixture no_kernels{.kernels = "/nonexistent.so", .checkpoint = checkpoint};
  expect_refused(no_kernels, GLM_UNSUPPORTED);
  Fixture bad_line{.kernels = kernels, .mixed = plan("mixed") + "nonsense\n", .checkpoint = checkpoint};
  expect_refused(bad_line, GLM_INVALID_ARGUMENT);
  Fixture bad_op{
      .kernels = kernels, .decode = plan("decode") + "op linear l x=x w=table out=x\n", .checkpoint = checkpoint};
  expect_refused(bad_op, GLM_INVALID_ARGUMENT);
  Fixture bad_tensor{.kernels = kernels,
                     .mixed = plan("mixed") + "vector v 3 tensor=absent\n",
                     .decode = plan("decode"),
                     .checkpoint = checkpoint};
  expect_refused(bad_tensor, GLM_BAD_CHECKPOINT);
  std::fstream file(checkpoint.path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(kWeightBytes * 5 - 1));
  file.put('\x7f').flush();
  Fixture nan{.kernels = kernels, .checkpoint = checkpoint};
  expect_refused(nan, GLM_BAD_CHECKPOINT);
}

template <class Function>
Function* find(void* table, const char* name) {
  auto* found = reinterpret_cast<Function*>(dlsym(table, name));
  EXPECT(found != nullptr);
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc == 2);
  const std::string kernels = argv[1];
  void* table = dlopen(argv[1], RTLD_NOW);
  EXPECT(table != nullptr);
  const auto fail = find<void(int32_t, int32_t, int32_t)>(table, "glm_fault_fail");
  const auto reset = find<void()>(table, "glm_fault_reset");
  const auto release = find<void()>(table, "glm_fault_release");
  const auto on_rank = find<void(int32_t)>(table, "glm_fault_on_rank");
  const auto hang = find<void(int32_t, int32_t)>(table, "glm_fault_hang");
  const auto wait_hanging = find<void(int32_t)>(table, "glm_fault_wait_hanging");

  const Checkpoint checkpoint("engine_test.bin");
  Fixture fixture{.kernels = kernels, .checkpoint = checkpoint};
  test_pipeline(fixture);
  test_destroy_with_steps_in_flight(fixture);
  test_failure_is_final(fixture, fail);
  reset();
  Fixture ranks{.kernels = kernels, .checkpoint = checkpoint, .num_ranks = 4};
  test_pipeline(ranks);
  test_destroy_with_steps_in_flight(ranks);
  test_rank_failure(ranks, fail, on_rank);
  test_abort(ranks, release, hang, wait_hanging, on_rank);
  test_failed_creation(checkpoint, kernels);
  dlclose(table);
  std::puts("engine test passed");
}
