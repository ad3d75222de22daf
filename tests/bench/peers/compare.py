"""What a token costs each engine, and the ratios of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine_worker.plan.cost import step_cost, total
from engine_worker.plan.record import Plan


@dataclass(frozen=True)
class Work:
    """Bytes read and FLOPs of one step: weights, cached keys and values; products and attention."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a model of llama's architecture. weight_bytes: of the tensors that a step reads in full; kv_bytes: of a
    cached number."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: int
    weights: int
    head_weights: int  # of `weights`, those of the output layer, which only sampled rows pass
    kv_bytes: int = 2

    def work(self, tokens: int, samples: int, contexts: Sequence[int]) -> Work:
        """`contexts`: each sequence's length after the step."""
        cached = sum(contexts) * self.layers * 2 * self.kv_heads * self.head_dim * self.kv_bytes
        news = tokens // len(contexts)
        scored = sum(news * context - news * (news - 1) // 2 for context in contexts)
        products = tokens * (self.weights - self.head_weights) + samples * self.head_weights
        attention = scored * self.layers * 2 * self.heads * self.head_dim
        return Work(self.weight_bytes + cached, 2.0 * (products + attention))


def glm_work(plan: Plan, tokens: int, samples: int, contexts: Sequence[int]) -> Work:
    """Of this engine's plan, on the same terms: without activations."""
    cost = total(step_cost(plan, tokens, samples, contexts))
    return Work(cost.weight_bytes + cost.kv_bytes, cost.flops)


@dataclass(frozen=True)
class Comparison:
    """A case: seconds of each repeat, ours beside the peer's that ran right before or after it."""

    name: str
    tokens: int
    ours_s: list[float]
    peer_s: list[float]
    our_work: Work
    peer_work: Work

    @property
    def ratio(self) -> float:
        """Our tokens a second over the peer's, the median of the pairs."""
        return statistics.median(peer / ours for ours, peer in zip(self.ours_s, self.peer_s, strict=True))

    @property
    def ratio_per_byte(self) -> float:
        return self.ratio * self.our_work.bytes / self.peer_work.bytes

    @property
    def ratio_per_flop(self) -> float:
        return self.ratio * self.our_work.flops / self.peer_work.flops

    def tokens_per_s(self) -> tuple[float, float]:
        """Ours and the peer's, the medians."""
        return self.tokens / statistics.median(self.ours_s), self.tokens / statistics.median(self.peer_s)
