#include "matmul.h"

#include <algorithm>
#include <type_traits>

#include "dot_tile.h"

GLM_CPU_BEGIN

namespace {

/* Registers hold kTileRows * 4 sums, kTileRows weights and one piece of x. */
#if defined(__AVX512F__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 3;
#endif
constexpr int kTileTokens = 4;
static_assert(kPanelRows % kTileRows == 0);
static_assert(kPanelCols % GLM_FP8_BLOCK == 0 && kPanelCols % kPadCols == 0);

/* A power-of-two pitch would put the rows of a tile into the same cache sets. */
constexpr int64_t kPanelPitch = kPanelCols + 16;

constexpr int direct_rows(int tokens) {
  return tokens == 1 ? 8 : tokens == 2 ? 4 : tokens == 3 ? 3 : 2;
}

struct Call {
  const WeightMatrix& matrix;
  int32_t row_begin;
  int32_t rows;
  int32_t num_tokens;
  const MatmulScratch& scratch;
  const float* x[kPanelTokens];
  const float* x_scales[kPanelTokens];

  bool by_block() const { return matrix.format == GLM_W_FP8_BLOCK; }
  const float* block_scales(int32_t r) const {
    if (!by_block()) return nullptr;
    return matrix.weight.scale + (row_begin + r) / GLM_FP8_BLOCK * matrix.weight.scale_stride;
  }
  /* Factors of a finished sum; multiplying by 1 changes no bit. */
  bool by_channel() const { return matrix.format == GLM_W_FP8_CHANNEL; }
  float row_scale(int32_t r) const { return by_channel() ? matrix.weight.scale[row_begin + r] : 1.0f; }
  float token_scale(int32_t t) const { return by_channel() ? x_scales[t][0] : 1.0f; }
  template <typename Element>
  const Element* weights(int32_t r) const {
    return static_cast<const Element*>(matrix.weight.data) + (row_begin + r) * matrix.weight.stride;
  }
  /* How many columns of row r a loader may read to cover `cols`: whole steps, though they reach into what follows the
   * row, where that adds nothing and still lies in the matrix. Copying the odd columns out costs more than a step. */
  template <typename Loader>
  int32_t covering(int32_t r, int32_t cols) const {
    constexpr int32_t kStep = Loader::kVectors * kLanes;
    const int32_t whole = (cols + kStep - 1) / kStep * kStep;
    const int64_t readable = (matrix.weight.rows - 1 - row_begin - r) * matrix.weight.stride + matrix.cols;
    return Loader::kAlwaysFinite && whole <= readable ? whole : cols;
  }
};

template <typename Loader, int R, int T>
void direct_tile(const Call& call, int32_t t0, int32_t r0, int32_t cols) {
  DotTile<Loader, R, T, true> tile;
  tile.ahead = R * call.matrix.weight.stride;
  for (int r = 0; r < R; ++r) {
    tile.w[r] = call.weights<typename Loader::Element>(r0 + r);
    tile.w_scales[r] = call.block_scales(r0 + r);
  }
  for (int t = 0; t < T; ++t) {
    tile.x[t] = call.x[t0 + t];
    tile.x_scales[t] = call.x_scales[t0 + t];
  }
  F32 sums[R * T] = {};
  if (std::is_same_v<Loader, Fp8Loader> && call.by_block()) {
    tile.accumulate_blocks(cols, sums);
  } else {
    tile.accumulate(cols, sums);
  }
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) {
      const float value = sum(sums[r * T + t]) * Loader::kScale;
      call.scratch.out[static_cast<int64_t>(t0 + t) * call.rows + r0 + r] =
          value * call.token_scale(t0 + t) * call.row_scale(r0 + r);
    }
  }
}

template <typename Loader, int T>
void direct_group(const Call& call, int32_t t0) {
  constexpr int kRows = direct_rows(T);
  const int32_t cols = call.covering<Loader>(call.rows - 2, call.matrix.cols);
  const int32_t last_cols = call.covering<Loader>(call.rows - 1, call.matrix.cols);
  int32_t r = 0;
  for (; r + kRows < call.rows; r += kRows) direct_tile<Loader, kRows, T>(call, t0, r, cols);
  if (r + kRows == call.rows) return direct_tile<Loader, kRows, T>(call, t0, r, last_cols);
  for (; r < call.rows; ++r) direct_tile<Loader, 1, T>(call, t0, r, last_cols);
}

/* The fewest groups, none much smaller than another: few sums do not hide the latency of their additions. */
template <typename Loader>
void direct(const Call& call) {
  const int32_t groups = (call.num_tokens + kTileTokens - 1) / kTileTokens;
  for (int32_t g = 0, t = 0; g < groups; ++g) {
    const int32_t end = call.num_tokens * (g + 1) / groups;
    switch (end - t) {
      case 1:
        direct_group<Loader, 1>(call, t);
        break;
      case 2:
        direct_group<Loader, 2>(call, t);
        break;
      case 3:
        direct_group<Loader, 3>(call, t);
        break;
      default:
        direct_group<Loader, 4>(call, t);
        break;
    }
    t = end;
  }
}

/* Columns [k, k + cols) of the call's rows to f32, with zeros up to `rows` rows and a whole vector of columns. */
template <typename Loader>
void expand(const Call& call, int32_t rows, int32_t k, int32_t cols) {
  constexpr int kStep = Loader::kVectors * kLanes;
  for (int32_t r = 0; r < rows; ++r) {
    float* out = call.scratch.weights + r * kPanelPitch;
    if (r >= call.rows) {
      std::fill_n(out, kPanelPitch, 0.0f);
      continue;
    }
    const auto* w = call.weights<typename Loader::Element>(r) + k;
    const int32_t covered = call.covering<Loader>(r, k + cols) - k;
    for (int32_t i = 0; i < covered; i += kStep) {
      F32 v[Loader::kVectors];
      __builtin_prefetch(w + i + kPanelCols, 0, 2);
      if (i + kStep <= covered) {
        Loader::load(w + i, v);
      } else {
        load_first_elements<Loader>(w + i, covered - i, v);
      }
      for (int j = 0; j < Loader::kVectors; ++j) store(out + i + j * kLanes, v[j]);
    }
  }
}

/* T rows of x, from t0 on, against the expanded panel of columns [k, k + cols). */
template <int T>
void panel_tiles(const Call& call, int32_t rows, int32_t t0, int32_t k, int32_t cols) {
  DotTile<F32Loader, kTileRows, T, false> tile;
  for (int t = 0; t < T; ++t) {
    tile.x[t] = call.x[t0 + t] + k;
    tile.x_scales[t] = call.by_block() ? call.x_scales[t0 + t] + k / GLM_FP8_BLOCK : nullptr;
  }
  for (int32_t r0 = 0; r0 < rows; r0 += kTileRows) {
    for (int r = 0; r < kTileRows; ++r) {
      tile.w[r] = call.scratch.weights + (r0 + r) * kPanelPitch;
      tile.w_scales[r] =
          call.by_block() ? call.block_scales(std::min(r0 + r, call.rows - 1)) + k / GLM_FP8_BLOCK : nullptr;
    }
    auto* sums = reinterpret_cast<F32*>(call.scratch.sums) + static_cast<int64_t>(t0) * rows + r0 * T;
    if (call.by_block()) {
      tile.accumulate_blocks(cols, sums);
    } else {
      tile.accumulate(cols, sums);
    }
  }
}

void panel_token_group(const Call& call, int32_t rows, int32_t t0, int32_t k, int32_t cols) {
  switch (std::min(kTileTokens, call.num_tokens - t0)) {
    case 1:
      return panel_tiles<1>(call, rows, t0, k, cols);
    case 2:
      return panel_tiles<2>(call, rows, t0, k, cols);
    case 3:
      return panel_tiles<3>(call, rows, t0, k, cols);
    default:
      return panel_tiles<4>(call, rows, t0, k, cols);
  }
}

/* The sums of T rows of x, from t0 on: lanes added, scaled, transposed. */
template <typename Loader, int T>
void write_tokens(const Call& call, int32_t rows, int32_t t0) {
  const auto* lanes = reinterpret_cast<const F32*>(call.scratch.sums) + static_cast<int64_t>(t0) * rows;
  float* out = call.scratch.out + static_cast<int64_t>(t0) * call.rows;
  float token_scales[T];
  for (int t = 0; t < T; ++t) token_scales[t] = call.token_scale(t0 + t);
  for (int32_t r = 0; r < call.rows; ++r, lanes += T) {
    float totals[T];
    if constexpr (T == 4) {
      sum_four(lanes, totals);
    } else {
      for (int t = 0; t < T; ++t) totals[t] = sum(lanes[t]);
    }
    const float row_scale = call.row_scale(r);
    for (int t = 0; t < T; ++t) out[t * call.rows + r] = totals[t] * Loader::kScale * token_scales[t] * row_scale;
  }
}

template <typename Loader>
void write_panel(const Call& call, int32_t rows) {
  for (int32_t t = 0; t < call.num_tokens; t += kTileTokens) {
    switch (std::min(kTileTokens, call.num_tokens - t)) {
      case 1:
        write_tokens<Loader, 1>(call, rows, t);
        break;
      case 2:
        write_tokens<Loader, 2>(call, rows, t);
        break;
      case 3:
        write_tokens<Loader, 3>(call, rows, t);
        break;
      default:
        write_tokens<Loader, 4>(call, rows, t);
        break;
    }
  }
}

template <typename Loader>
void panel(const Call& call) {
  constexpr int32_t kStep = Loader::kVectors * kLanes;
  const int32_t rows = (call.rows + kTileRows - 1) / kTileRows * kTileRows;
  std::fill_n(call.scratch.sums, static_cast<int64_t>(rows) * call.num_tokens * kLanes, 0.0f);
  for (int32_t k = 0; k < call.matrix.cols; k += kPanelCols) {
    const int32_t cols = std::min(kPanelCols, call.matrix.cols - k);
    expand<Loader>(call, rows, k, cols);
    const int32_t whole = (cols + kStep - 1) / kStep * kStep;
    for (int32_t t = 0; t < call.num_tokens; t += kTileTokens) panel_token_group(call, rows, t, k, whole);
  }
  write_panel<Loader>(call, rows);
}

template <typename Loader>
void run(const Call& call) {
  if (call.num_tokens <= kDirectTokens) return direct<Loader>(call);
  panel<Loader>(call);
}

int64_t element_bytes(glm_weight_format format) {
  switch (format) {
    case GLM_W_F32:
      return 4;
    case GLM_W_BF16:
    case GLM_W_F16:
      return 2;
    default:
      return 1;
  }
}

constexpr size_t kWeightFloats = kPanelRows * kPanelPitch;
constexpr size_t kSumFloats = static_cast<size_t>(kPanelRows) * kPanelTokens * kLanes;
static_assert(kWeightFloats % 16 == 0 && kSumFloats % 16 == 0 && kMatmulOutFloats % 16 == 0,
              "blocks stay on cache lines");

}  // namespace

size_t matmul_scratch_floats() {
  return kWeightFloats + kSumFloats + kMatmulOutFloats;
}

MatmulScratch matmul_scratch(float* block, int thread) {
  float* base = block + static_cast<size_t>(thread) * matmul_scratch_floats();
  return {base, base + kWeightFloats, base + kWeightFloats + kSumFloats};
}

int32_t matmul_row_block(glm_weight_format format, int32_t rows, int32_t cols, int64_t tokens, int num_threads) {
  if (tokens > kDirectTokens) return kPanelRows;
  constexpr int64_t kBytesPerCall = 32768; /* some microseconds of memory traffic */
  constexpr int64_t kMultiple = 8;
  const int64_t by_size = kBytesPerCall / (element_bytes(format) * cols);
  const int64_t by_share = rows / (4 * num_threads);
  const int64_t block = (std::min(by_size, by_share) + kMultiple - 1) / kMultiple * kMultiple;
  return static_cast<int32_t>(std::clamp<int64_t>(block, kMultiple, kDirectRows));
}

void matmul(const WeightMatrix& matrix, int32_t row_begin, int32_t rows, const Activations& x, const TokenList& tokens,
            int64_t token_begin, int32_t num_tokens, const MatmulScratch& scratch) {
  Call call{.matrix = matrix,
            .row_begin = row_begin,
            .rows = rows,
            .num_tokens = num_tokens,
            .scratch = scratch,
            .x = {},
            .x_scales = {}};
  for (int32_t t = 0; t < num_tokens; ++t) {
    const int64_t row = tokens.row(token_begin + t);
    call.x[t] = x.row(row);
    call.x_scales[t] = x.row_scales(row);
  }
  switch (matrix.format) {
    case GLM_W_F32:
      return run<F32Loader>(call);
    case GLM_W_BF16:
      return run<Bf16Loader>(call);
    case GLM_W_F16:
      return run<F16Loader>(call);
    case GLM_W_FP8_CHANNEL:
    case GLM_W_FP8_BLOCK:
      return run<Fp8Loader>(call);
  }
}

GLM_CPU_END
