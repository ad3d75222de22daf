/* The tiles of an expert layer on wgmma: which a block takes, and where their weights and tokens lie. */
#ifndef GLM_CUDA_EXPERTS_TILE_CUH
#define GLM_CUDA_EXPERTS_TILE_CUH

#include "experts_wgmma.h"
#include "wgmma_tile.cuh"

namespace glm::cuda {

/* Output channels of a tile. With gate and up, groups of eight rows alternate between them, so that a thread gets both of a channel. */
template <ExpertLayer kLayer>
constexpr int kLayerChannels = kLayer == ExpertLayer::kGateUp ? kWgmmaChannels / 2 : kWgmmaChannels;

struct ExpertTile {
  int expert;
  int channel; /* first output channel */
  int first;   /* first token's place in the order */
  int count;   /* tokens */
};

constexpr int kFewTokens = 8;

/* Of up to kFewTokens tokens an expert has one tile at most, since a token has an expert once. By whole warps, a lane an expert: how
 * many experts have tokens, and the n-th of them, -1 past the last. */
__device__ __forceinline__ uint32_t touched_mask(const ExpertParams& p, const int32_t* offsets, int base) {
  const int expert = base + static_cast<int>(threadIdx.x) % kWarp;
  return __ballot_sync(0xffffffffu, expert < p.first.count && offsets[expert + 1] > offsets[expert]);
}
__device__ __forceinline__ int touched_experts(const ExpertParams& p, const int32_t* offsets) {
  int touched = 0;
  for (int base = 0; base < p.first.count; base += kWarp) touched += __popc(touched_mask(p, offsets, base));
  return touched;
}
__device__ __forceinline__ int find_touched(const ExpertParams& p, const int32_t* offsets, int n) {
  for (int base = 0; base < p.first.count; base += kWarp) {
    uint32_t mask = touched_mask(p, offsets, base);
    for (; n > 0 && mask != 0; --n) mask &= mask - 1;
    if (mask != 0) return base + __ffs(static_cast<int>(mask)) - 1;
  }
  return -1;
}
__device__ __forceinline__ ExpertTile whole_expert(const int32_t* offsets, int expert, int channel) {
  return {expert, channel, offsets[expert], offsets[expert + 1] - offsets[expert]};
}

/* The tiles of a launch, expert by expert, channels before tokens. The walk takes every stride-th from `first` on. */
template <int kChannels, int kTokens>
class ExpertWalk {
 public:
  __device__ __forceinline__ ExpertWalk(const ExpertParams& p, const int32_t* offsets, int first, int stride)
      : p_(p),
        offsets_(offsets),
        experts_(p.first.count),
        channel_tiles_((p.first.rows + kChannels - 1) / kChannels),
        index_(first),
        stride_(stride) {}

  /* By whole warps. False past the last tile. */
  __device__ __forceinline__ bool find() {
    if constexpr (kTokens == kFewTokens) {
      expert_ = find_touched(p_, offsets_, index_ / channel_tiles_);
      return expert_ >= 0;
    } else {
      while (expert_ < experts_ && index_ >= token_tiles() * channel_tiles_) {
        index_ -= token_tiles() * channel_tiles_;
        ++expert_;
      }
      return expert_ < experts_;
    }
  }
  __device__ __forceinline__ void next() { index_ += stride_; }

  __device__ __forceinline__ ExpertTile tile() const {
    const int channel = index_ % channel_tiles_ * kChannels;
    if constexpr (kTokens == kFewTokens) {
      return whole_expert(offsets_, expert_, channel);
    } else {
      const int first = offsets_[expert_] + index_ / channel_tiles_ * kTokens;
      return {expert_, channel, first, min(kTokens, offsets_[expert_ + 1] - first)};
    }
  }

 private:
  __device__ __forceinline__ int token_tiles() const {
    return (offsets_[expert_ + 1] - offsets_[expert_] + kTokens - 1) / kTokens;
  }

  const ExpertParams& p_;
  const int32_t* offsets_;
  int experts_;
  int channel_tiles_;
  int index_; /* within the expert's tiles */
  int stride_;
  int expert_ = 0;
};

/* An expert's gate and up, or down alone. */
struct ExpertPair {
  glm_weight first;
  glm_weight second;
};

template <ExpertLayer kLayer>
__device__ __forceinline__ ExpertPair expert_weights(const ExpertParams& p, int expert) {
  ExpertPair pair = {p.first.experts[expert], {}};
  if (kLayer == ExpertLayer::kGateUp) pair.second = p.second.experts[expert];
  return pair;
}

template <ExpertLayer kLayer, Operand kOperand>
__device__ __forceinline__ bool are_aligned(const ExpertPair& weights, const ExpertParams& p) {
  return p.tokens_aligned && is_weight_aligned<kOperand>(weights.first) &&
         (kLayer == ExpertLayer::kDown || is_weight_aligned<kOperand>(weights.second));
}

/* Rows past the weights' end repeat the last one. */
template <ExpertLayer kLayer, Operand kOperand>
__device__ __forceinline__ LoaderRows<8> expert_rows(const ExpertPair& weights, int channel) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  LoaderRows<8> from;
  from.groups = 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool paired = kLayer == ExpertLayer::kGateUp;
    const glm_weight& weight = paired && i % 2 == 1 ? weights.second : weights.first;
    const int64_t row = min(channel + (paired ? i / 2 : i) * 8 + loader_row(), weight.rows - 1);
    from.rows[i] = static_cast<const uint8_t*>(weight.data) + row * weight.stride * kElement;
  }
  return from;
}

/* x_row, by one division for any number of assignments: of those, any times top_k is below 2^31. */
class RowOfX {
 public:
  __device__ __forceinline__ explicit RowOfX(const ExpertInputs& in)
      : inverse_(in.x_by_token ? 0x7fffffffu / static_cast<uint32_t>(in.top_k) + 1 : 0x80000000u) {}
  __device__ __forceinline__ int64_t operator()(int32_t assignment) const {
    return __umulhi(2u * static_cast<uint32_t>(assignment), inverse_);
  }

 private:
  uint32_t inverse_; /* 2^31 / top_k, rounded up */
};

template <Operand kOperand, int kTokens>
__device__ __forceinline__ LoaderRows<kTokens / 8> assignment_rows(const ExpertInputs& in, const ExpertTile& tile) {
  constexpr int kElement = kOperand == Operand::kBf16 ? 2 : 1;
  const RowOfX row(in);
  LoaderRows<kTokens / 8> from;
  from.groups = (tile.count + 7) / 8;
#pragma unroll
  for (int i = 0; i < kTokens / 8; ++i) {
    const int32_t assignment = in.order[tile.first + min(i * 8 + loader_row(), tile.count - 1)];
    from.rows[i] = static_cast<const uint8_t*>(in.x.data) + row(assignment) * in.x.stride * kElement;
  }
  return from;
}

}  // namespace glm::cuda

#endif
