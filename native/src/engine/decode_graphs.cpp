#include "engine/decode_graphs.h"

#include <algorithm>
#include <bit>

namespace glm {
namespace {

// 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ...: from 16 on at most half of a step is padding, most often far less.
std::vector<int32_t> make_buckets(int32_t max_rows) {
  constexpr int32_t kLastDoubled = 16;
  std::vector<int32_t> buckets;
  for (int32_t rows = 1; rows < max_rows;) {
    buckets.push_back(rows);
    rows += rows < kLastDoubled ? rows : static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(rows)) / 2);
  }
  buckets.push_back(max_rows);
  return buckets;
}

}  // namespace

DecodeGraphs::DecodeGraphs(const Device& device, Executor& decode, glm_step_inputs& step, int32_t max_rows)
    : buckets_(make_buckets(max_rows)) {
  for (const int32_t rows : buckets_) {
    step.num_rows = step.num_seqs = step.num_samples = rows;
    decode.run_forward(rows, rows);
    decode.run_sample(rows, rows);
    device.synchronize();  // making a graph may wait for what runs on any device, and that may wait for another rank
    Graph graph(device);
    decode.run_forward(rows, rows);
    graph.finish();
    graphs_.push_back(std::move(graph));
  }
}

size_t DecodeGraphs::index(int32_t rows) const {
  return static_cast<size_t>(std::ranges::lower_bound(buckets_, rows) - buckets_.begin());
}

int32_t DecodeGraphs::bucket(int32_t rows) const {
  return buckets_[index(rows)];
}

void DecodeGraphs::launch(int32_t rows) const {
  graphs_[index(rows)].launch();
}

}  // namespace glm
