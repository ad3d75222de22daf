/* top-k, top-p and min-p. In the order (value descending, id ascending) each keeps a prefix, so together they are one
 * cut. The end of a prefix is found by radix selection on the bits of the values: exact, without sorting, and, where
 * ranks have parts of the vocabulary, from sums over ranks alone. */
#ifndef GLM_CPU_SAMPLE_CUT_H
#define GLM_CPU_SAMPLE_CUT_H

#include <cmath>

#include "exchange.h"
#include "sample_block.h"

GLM_CPU_BEGIN

/* The last token kept, of this rank's: id -1 if it keeps none of that value. */
struct Cut {
  float value = kNever;
  int32_t id = std::numeric_limits<int32_t>::max();
};

inline bool kept(float value, int32_t id, const Cut& cut) {
  return value > cut.value || (value == cut.value && id <= cut.id);
}

/* How much of the distribution lies within each distance of the best value: bounds the search for a cut from below. */
inline constexpr int kBands = 4;
inline constexpr float kBandDepth[kBands] = {2.0f, 4.0f, 8.0f, 16.0f};

struct Bands {
  double total = 0.0; /* sum of exp(value - max) over all tokens */
  double mass[kBands] = {};
  int64_t count[kBands] = {};

  void add(const Bands& other) {
    total += other.total;
    for (int band = 0; band < kBands; ++band) {
      mass[band] += other.mass[band];
      count[band] += other.count[band];
    }
  }
};

inline void add_to_bands(const float* block, float max, Bands* bands) {
  float weights[kBlock];
  bands->total += block_exp(block, max, weights);
  for (int band = 0; band < kBands; ++band) {
    const F32 floor = broadcast(max - kBandDepth[band]);
    F32 mass = {};
    I32 count = {};
    for (int32_t i = 0; i < kBlock; i += kLanes) {
      const I32 inside = load(block + i) >= floor;
      mass += inside ? load(weights + i) : F32{};
      count -= inside;
    }
    bands->mass[band] += sum(mass);
    for (int lane = 0; lane < kLanes; ++lane) bands->count[band] += count[lane];
  }
}

/* This rank's values of one sample, and its blocks' maxima. */
struct Distribution {
  const float* values;
  const float* block_max;
  int32_t columns;
  int32_t first; /* id of values[0] */
  int32_t vocab; /* tokens on all ranks */
  float max;     /* on all ranks */
  float* room;   /* for as many values */
};

/* Larger values have smaller keys; 0 and -0 have the same. */
inline uint32_t descending_key(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
  return (bits >> 31) != 0 ? bits : ~(bits | 0x80000000u);
}

inline float value_of_key(uint32_t key) {
  return std::bit_cast<float>((key >> 31) != 0 ? key : ~key & 0x7fffffffu);
}

/* Finds the shortest prefix whose weight reaches `target`, each token weighing exp(value - max), or 1. No token below
 * `floor` may be needed for it; if all of them together fall short, everything is kept. */
class PrefixSearch {
 public:
  PrefixSearch(const Distribution& values, float floor, bool by_count, Exchange& exchange)
      : values_(values), floor_(floor), by_count_(by_count), exchange_(exchange) {}

  Cut find(double target) {
    uint32_t prefix = 0;
    double before = 0.0;
    for (int level = 0; level < kLevels; ++level) {
      count_bins(level, prefix);
      exchange_.sum(bins_, 1 << kBits[level]);
      const int bin = crossing_bin(level, target, &before);
      if (bin < 0) return {};
      prefix = prefix << kBits[level] | static_cast<uint32_t>(bin);
    }
    return among_equals(value_of_key(prefix), target, before);
  }

 private:
  static constexpr int kLevels = 3;
  static constexpr int kBits[kLevels] = {11, 11, 10};
  static constexpr int kShift[kLevels] = {21, 10, 0};
  static constexpr int kMostBins = 1 << 11;
  static constexpr int kInterleaved = 4;

  double weight(float value) const { return by_count_ ? 1.0 : exp_below(value, values_.max); }

  template <typename Visit>
  void for_each_candidate(float floor, Visit visit) const {
    for (int32_t begin = 0; begin < values_.columns; begin += kBlock) {
      if (values_.block_max[begin / kBlock] < floor) continue;
      const int32_t end = std::min(values_.columns, begin + kBlock);
      for (int32_t i = begin; i < end; ++i) {
        if (values_.values[i] >= floor && !visit(values_.values[i], values_.first + i)) return;
      }
    }
  }

  /* Weights of the tokens whose key starts with `prefix`, by the key's next bits. */
  void count_bins(int level, uint32_t prefix) {
    std::fill(bins_, bins_ + kInterleaved * kMostBins, 0.0);
    num_candidates_ = level == 0 ? 0 : keep_candidates(level, prefix);
    if (level == 0) {
      for_each_floored_block([&](const float* block, int32_t n) { count_block(level, block, n); });
    } else {
      for (int32_t i = 0; i < num_candidates_; i += kBlock) {
        count_block(level, values_.room + i, std::min(kBlock, num_candidates_ - i));
      }
    }
    for (int j = 1; j < kInterleaved; ++j) {
      for (int bin = 0; bin < kMostBins; ++bin) bins_[bin] += bins_[j * kMostBins + bin];
    }
  }

  /* Moves the values whose key starts with `prefix` to `room`; those of later levels are among those of the one before.
   * Without branches: in a flat distribution half of them would be mispredicted. */
  int32_t keep_candidates(int level, uint32_t prefix) const {
    const int above = kShift[level] + kBits[level];
    int32_t kept = 0;
    const auto keep = [&](const float* values, int32_t n) {
      for (int32_t i = 0; i < n; ++i) {
        const float value = values[i];
        values_.room[kept] = value;
        kept += static_cast<int32_t>((value >= floor_) & ((descending_key(value) >> above) == prefix));
      }
    };
    if (level == 1) {
      for_each_floored_block(keep);
    } else {
      keep(values_.room, num_candidates_);
    }
    return kept;
  }

  /* Tokens below the floor add 0 to some bin. A flat distribution falls into few bins: neighbours add to bins of their own, which do not
   * wait for each other. */
  void count_block(int level, const float* block, int32_t n) {
    const uint32_t mask = (1u << kBits[level]) - 1;
    float weights[kBlock];
    uint32_t bin[kBlock];
    for (int32_t i = 0; i < n; ++i) {
      const float weight = by_count_ ? 1.0f : exp_below(block[i], values_.max);
      weights[i] = block[i] >= floor_ ? weight : 0.0f;
      bin[i] =
          ((descending_key(block[i]) >> kShift[level]) & mask) + static_cast<uint32_t>(i) % kInterleaved * kMostBins;
    }
    for (int32_t i = 0; i < n; ++i) bins_[bin[i]] += weights[i];
  }

  template <typename Visit>
  void for_each_floored_block(Visit visit) const {
    for (int32_t begin = 0; begin < values_.columns; begin += kBlock) {
      if (values_.block_max[begin / kBlock] < floor_) continue;
      visit(values_.values + begin, std::min(kBlock, values_.columns - begin));
    }
  }

  /* -1 if the first level falls short. At later levels rounding alone can do that: the last bin is the one. */
  int crossing_bin(int level, double target, double* before) const {
    int last = -1;
    for (int bin = 0; bin < 1 << kBits[level]; ++bin) {
      if (bins_[bin] == 0.0) continue;
      if (last >= 0) *before += bins_[last];
      last = bin;
      if (*before + bins_[bin] >= target) return bin;
    }
    return level == 0 ? -1 : last;
  }

  /* Tokens of this value on ranks whose ids are lower than this rank's. */
  double equals_below(float value) const {
    if (exchange_.alone()) return 0.0;
    double counts[GLM_MAX_RANKS] = {};
    for_each_candidate(value, [&](float candidate, int32_t) {
      counts[exchange_.rank()] += candidate == value;
      return true;
    });
    exchange_.sum(counts, exchange_.num_ranks());
    double below = 0.0;
    for (int rank = 0; rank < exchange_.rank(); ++rank) below += counts[rank];
    return below;
  }

  Cut among_equals(float value, double target, double before) const {
    Cut cut{value, -1};
    const double below = equals_below(value);
    for (double i = 0.0; i < below; ++i) before += weight(value);
    if (below > 0.0 && before >= target) return cut;
    for_each_candidate(value, [&](float candidate, int32_t id) {
      if (candidate != value) return true;
      before += weight(value);
      cut = {value, id};
      return before < target;
    });
    return cut;
  }

  const Distribution& values_;
  float floor_;
  bool by_count_;
  Exchange& exchange_;
  int32_t num_candidates_ = 0;
  double bins_[kInterleaved * kMostBins]; /* the first kMostBins are the sums */
};

/* The higher of two cuts. */
inline Cut narrower(const Cut& a, const Cut& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id) ? a : b;
}

/* The depth below the maximum that surely holds the tokens to be kept. A band must exceed the mass by more than its sum
 * can be off. */
inline float search_floor(const glm_sampling& request, const Bands& bands, float max) {
  for (int band = 0; band < kBands; ++band) {
    const bool enough = request.top_k > 0 ? bands.count[band] >= request.top_k
                                          : bands.mass[band] > request.top_p * bands.total * 1.0001;
    if (enough) return max - kBandDepth[band];
  }
  return kNever;
}

/* Sum of exp(value - max) over this rank's tokens that are kept. */
inline double mass_kept(const Distribution& values, const Cut& cut) {
  double mass = 0.0;
  for (int32_t begin = 0; begin < values.columns; begin += kBlock) {
    if (values.block_max[begin / kBlock] < cut.value) continue;
    const int32_t end = std::min(values.columns, begin + kBlock);
    for (int32_t i = begin; i < end; ++i) {
      if (kept(values.values[i], values.first + i, cut)) mass += exp_below(values.values[i], values.max);
    }
  }
  return mass;
}

inline bool needs_bands(const glm_sampling& request) {
  return request.top_k > 0 || request.top_p < 1.0f;
}

/* Step 2 of glm_sample_args. */
inline Cut find_cut(const glm_sampling& request, const Distribution& values, const Bands& bands, Exchange& exchange) {
  Cut cut;
  const float floor = search_floor(request, bands, values.max);
  double mass = bands.total;
  if (request.top_k > 0 && request.top_k < values.vocab) {
    cut = PrefixSearch(values, floor, true, exchange).find(request.top_k);
    mass = mass_kept(values, cut);
    exchange.sum(&mass, 1);
  }
  if (request.top_p < 1.0f) {
    cut = narrower(cut, PrefixSearch(values, floor, false, exchange).find(request.top_p * mass));
  }
  if (request.min_p > 0.0f) {
    const auto lowest = static_cast<float>(values.max + std::log(static_cast<double>(request.min_p)));
    cut = narrower(cut, {lowest, std::numeric_limits<int32_t>::max()});
  }
  return cut;
}

GLM_CPU_END

#endif
