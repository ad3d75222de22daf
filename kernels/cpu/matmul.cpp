#include "matmul.h"

#include <algorithm>

#include "dot_tile.h"
#include "kept_tile.h"

GLM_CPU_BEGIN

namespace {

/* Registers hold R * T sums beside their operands; fewer sums do not hide the latency of their additions. R divides
 * kRowMultiple. */
constexpr int tile_rows(int tokens) {
  return tokens == 1 ? 8 : tokens < 4 ? 4 : tokens == 4 ? 3 : 2;
}
constexpr int32_t kRowMultiple = 24;

struct Call {
  Call(const WeightRows& w, int32_t num_tokens, float* out, float* kept)
      : matrix(w.matrix),
        row_begin(w.begin),
        rows(w.rows),
        then(w.then),
        num_tokens(num_tokens),
        out(out),
        kept(kept) {}

  const WeightMatrix& matrix;
  int32_t row_begin;
  int32_t rows;
  const std::byte* then;
  int32_t num_tokens;
  float* out;
  float* kept;
  const float* x[kMatmulTokens];
  const float* x_scales[kMatmulTokens]; /* block format */
  float token_factors[kMatmulTokens];   /* of finished sums; */
  float row_factors[kMatmulRows];       /* multiplying by 1 changes no bit */

  const float* block_scales(int32_t r) const {
    return matrix.weight.scale + (row_begin + r) / GLM_FP8_BLOCK * matrix.weight.scale_stride;
  }
  /* What a tile at row r should fetch: rows some thousands of bytes ahead, the latency of memory. */
  const std::byte* ahead(int32_t r) const {
    constexpr int32_t kRowsAhead = 8;
    const int32_t wanted = r + kRowsAhead;
    return wanted < rows ? matrix.row(row_begin + wanted) : then + (wanted - rows) * matrix.row_bytes();
  }
  /* How many columns of row r a loader may read to cover all: whole steps, though they reach into what follows the row,
   * where that adds nothing and still lies in the matrix. Copying the odd columns out costs more than a step. */
  template <typename Loader>
  int32_t covering(int32_t r) const {
    constexpr int32_t kStep = Loader::kVectors * kLanes;
    const int32_t whole = (matrix.cols + kStep - 1) / kStep * kStep;
    const int64_t readable = (matrix.weight.rows - 1 - row_begin - r) * matrix.weight.stride + matrix.cols;
    return Loader::kAlwaysFinite && whole <= readable ? whole : matrix.cols;
  }
};

/* sums[r][t] += w[r] . x[t], block by block. */
template <typename Tile, int R, int T>
[[gnu::always_inline]] inline void accumulate_blocks(const Call& call, const Tile& tile, int32_t t0, int32_t r0,
                                                     int32_t cols, F32 (&sums)[R][T]) {
  for (int32_t k = 0, b = 0; k < cols; k += GLM_FP8_BLOCK, ++b) {
    F32 part[R][T] = {};
    tile.accumulate(k, std::min<int32_t>(cols, k + GLM_FP8_BLOCK), part);
    unrolled<R>([&](auto r) GLM_INLINE {
      const float row_scale = call.block_scales(r0 + r)[b];
      unrolled<T>([&](auto t) GLM_INLINE {
        const F32 scale = broadcast(call.x_scales[t0 + t][b] * row_scale);
        sums[r][t] = multiply_add(part[r][t], scale, sums[r][t]);
      });
    });
  }
}

/* Lanes added, scaled and stored, four sums at a time. */
template <int R, int T>
[[gnu::always_inline]] inline void write_sums(const Call& call, int32_t t0, int32_t r0, const F32 (&sums)[R][T]) {
  float* out = call.out + static_cast<int64_t>(t0) * call.rows + r0;
  const float* token_factors = call.token_factors + t0;
  const float* row_factors = call.row_factors + r0;
  unrolled<(R * T + 3) / 4>([&](auto group) GLM_INLINE {
    constexpr int kLast = R * T - 1; /* stands in for those that the last group lacks */
    constexpr int a = group * 4, b = std::min(a + 1, kLast), c = std::min(a + 2, kLast), d = std::min(a + 3, kLast);
    const F32x4 totals = sum_four(sums[a / T][a % T], sums[b / T][b % T], sums[c / T][c % T], sums[d / T][d % T]);
    const F32x4 by_token = {token_factors[a % T], token_factors[b % T], token_factors[c % T], token_factors[d % T]};
    const F32x4 by_row = {row_factors[a / T], row_factors[b / T], row_factors[c / T], row_factors[d / T]};
    const F32x4 values = totals * by_token * by_row;
    out[a % T * call.rows + a / T] = values[0];
    if (a + 1 == b) out[b % T * call.rows + b / T] = values[1];
    if (a + 2 == c) out[c % T * call.rows + c / T] = values[2];
    if (a + 3 == d) out[d % T * call.rows + d / T] = values[3];
  });
}

template <bool kBlocks, int R, int T, typename Tile>
[[gnu::always_inline]] inline void run_tile(const Call& call, const Tile& tile, int32_t t0, int32_t r0, int32_t cols) {
  F32 sums[R][T];
  unrolled<R * T>([&](auto i) GLM_INLINE { sums[i / T][i % T] = F32{}; });
  if constexpr (kBlocks) {
    accumulate_blocks(call, tile, t0, r0, cols, sums);
  } else {
    tile.accumulate(0, cols, sums);
  }
  write_sums(call, t0, r0, sums);
}

/* Rows of weights as they are stored; kKeep: expanded for `run_kept_tile` too. */
template <typename Loader, bool kBlocks, int R, int T, bool kKeep = false>
[[gnu::noinline]] void run_weight_tile(const Call& call, int32_t t0, int32_t r0, int32_t cols, float* kept) {
  DotTile<Loader, R, T, kKeep> tile;
  const auto* w = reinterpret_cast<const typename Loader::Element*>(call.matrix.row(call.row_begin + r0));
  unrolled<R>([&](auto r) GLM_INLINE { tile.w[r] = w + r * call.matrix.weight.stride; });
  unrolled<T>([&](auto t) GLM_INLINE { tile.x[t] = call.x[t0 + t]; });
  tile.ahead = call.ahead(r0);
  tile.kept = kept;
  run_tile<kBlocks, R, T>(call, tile, t0, r0, cols);
}

template <bool kBlocks, int R, int T>
[[gnu::noinline]] void run_kept_tile(const Call& call, int32_t t0, int32_t r0, int32_t cols, const float* kept) {
  KeptTile<R, T> tile;
  unrolled<T>([&](auto t) GLM_INLINE { tile.x[t] = call.x[t0 + t]; });
  tile.kept = kept;
  run_tile<kBlocks, R, T>(call, tile, t0, r0, cols);
}

/* All rows for T of few tokens. */
template <typename Loader, bool kBlocks, int T>
void run_few(const Call& call, int32_t t0) {
  constexpr int R = tile_rows(T);
  static_assert(kRowMultiple % R == 0);
  const int32_t cols = call.covering<Loader>(call.rows - 2);
  const int32_t last_cols = call.covering<Loader>(call.rows - 1);
  int32_t r = 0;
  for (; r + R < call.rows; r += R) run_weight_tile<Loader, kBlocks, R, T>(call, t0, r, cols, nullptr);
  if (r + R == call.rows) return run_weight_tile<Loader, kBlocks, R, T>(call, t0, r, last_cols, nullptr);
  for (; r < call.rows; ++r) run_weight_tile<Loader, kBlocks, 1, T>(call, t0, r, last_cols, nullptr);
}

/* Rows [begin, end) for T of many tokens: the first ones leave them in `call.kept`, where the others find them. */
template <typename Loader, bool kBlocks, int T>
void run_group(const Call& call, int32_t t0, int32_t begin, int32_t end) {
  constexpr int R = kKeptTileRows;
  constexpr int kStep = Loader::kVectors * kLanes;
  const int32_t cols = call.covering<Loader>(call.rows - 2);
  const int32_t last_cols = call.covering<Loader>(call.rows - 1);
  const int32_t kept_cols = (call.matrix.cols + kStep - 1) / kStep * kStep;
  float* kept = call.kept;
  int32_t r = begin;
  for (; r + R <= end; r += R, kept += R * kept_cols) {
    if (t0 == 0) {
      run_weight_tile<Loader, kBlocks, R, T, true>(call, t0, r, r + R == call.rows ? last_cols : cols, kept);
    } else {
      run_kept_tile<kBlocks, R, T>(call, t0, r, kept_cols, kept);
    }
  }
  for (; r < end; ++r, kept += kept_cols) {
    if (t0 == 0) {
      run_weight_tile<Loader, kBlocks, 1, T, true>(call, t0, r, last_cols, kept);
    } else {
      run_kept_tile<kBlocks, 1, T>(call, t0, r, kept_cols, kept);
    }
  }
}

template <typename Loader, bool kBlocks>
void run_many(const Call& call) {
  const int32_t block = KeptWeights::rows(call.matrix.cols);
  for (int32_t begin = 0; begin < call.rows; begin += block) {
    const int32_t end = std::min(call.rows, begin + block);
    for (int32_t t = 0; t < call.num_tokens;) {
      const int32_t left = call.num_tokens - t;
      if (left % 4 == 0 || (left % 4 == 3 && left > 3)) {
        run_group<Loader, kBlocks, 4>(call, t, begin, end);
        t += 4;
      } else {
        run_group<Loader, kBlocks, 3>(call, t, begin, end);
        t += 3;
      }
    }
  }
}

template <typename Loader, bool kBlocks>
void run_few(const Call& call, int32_t t0, int32_t tokens) {
  if (tokens == 1) return run_few<Loader, kBlocks, 1>(call, t0);
  if (tokens == 2) return run_few<Loader, kBlocks, 2>(call, t0);
  if (tokens == 3) return run_few<Loader, kBlocks, 3>(call, t0);
  if (tokens == 4) return run_few<Loader, kBlocks, 4>(call, t0);
  if (tokens == 5) return run_few<Loader, kBlocks, 5>(call, t0);
  if (tokens == 6) return run_few<Loader, kBlocks, 6>(call, t0);
}

template <typename Loader, bool kBlocks = false>
void run(Call& call) {
  const bool by_channel = call.matrix.format == GLM_W_FP8_CHANNEL;
  for (int32_t t = 0; t < call.num_tokens; ++t) {
    call.token_factors[t] = Loader::kScale * (by_channel ? call.x_scales[t][0] : 1.0f);
  }
  for (int32_t r = 0; r < call.rows; ++r) {
    call.row_factors[r] = by_channel ? call.matrix.weight.scale[call.row_begin + r] : 1.0f;
  }
  if (call.num_tokens > 8 && call.matrix.cols <= kMostKeptCols) return run_many<Loader, kBlocks>(call);
  int32_t t = 0;
  for (; call.num_tokens - t > 6; t += 4) run_few<Loader, kBlocks, 4>(call, t);
  run_few<Loader, kBlocks>(call, t, call.num_tokens - t);
}

}  // namespace

int32_t matmul_row_block(glm_weight_format format, int32_t rows, int32_t cols, int64_t num_matrices, int64_t tokens,
                         int num_threads) {
  constexpr int64_t kBytes = 49152; /* some microseconds of memory traffic; stays in the second-level cache */
  const int64_t by_size = kBytes / (element_bytes(format) * cols);
  const int64_t by_share = std::min<int64_t>(rows, rows * num_matrices / (4 * num_threads));
  const int64_t most = std::min<int64_t>(kMatmulRows, kMatmulOutFloats / std::min<int64_t>(tokens, kMatmulTokens));
  const int64_t block = (std::min(by_size, by_share) + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
  return static_cast<int32_t>(std::clamp<int64_t>(block, kRowMultiple, most / kRowMultiple * kRowMultiple));
}

void matmul(const WeightRows& w, const Activations& x, const TokenList& tokens, int64_t token_begin, int32_t num_tokens,
            float* out, float* kept) {
  Call call(w, num_tokens, out, kept);
  for (int32_t t = 0; t < num_tokens; ++t) {
    const int64_t row = tokens.row(token_begin + t);
    call.x[t] = x.row(row);
    call.x_scales[t] = x.row_scales(row);
  }
  switch (w.matrix.format) {
    case GLM_W_F32:
      return run<F32Loader>(call);
    case GLM_W_BF16:
      return run<Bf16Loader>(call);
    case GLM_W_F16:
      return run<F16Loader>(call);
    case GLM_W_FP8_CHANNEL:
      return run<Fp8Loader>(call);
    case GLM_W_FP8_BLOCK:
      return run<Fp8Loader, true>(call);
  }
}

GLM_CPU_END
