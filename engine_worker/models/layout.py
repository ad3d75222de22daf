"""How a model is spread over ranks: what each of them holds.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019), expert parallelism as in GShard (Lepikhin et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine_worker.errors import ConfigError
from engine_worker.models.config import ModelConfig
from engine_worker.models.placement import ExpertPlacement
from engine_worker.weights.records import FP8_BLOCK, Span

MAX_RANKS = 64
VOCAB_GRAIN = 4  # glm_sample_args.first is a multiple of it
WIDTH_GRAIN = 16  # what does not divide evenly is cut where kernels find aligned rows


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's place among `tp` ranks.

    Heads, dense and shared-expert widths and the vocabulary are divided among all. Experts are divided among `ep`
    groups of tp/ep ranks, and each expert's width among the ranks of its group: ep = tp is whole experts, ep = 1 tensor
    parallelism throughout. Norms, router and embeddings are on every rank; so is a KV head that several ranks read.

    `alone`: a rank slice, which runs without the other ranks: it exchanges nothing, and its numbers mean nothing.
    """

    tp: int = 1
    ep: int = 1
    rank: int = 0
    alone: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= MAX_RANKS:
            raise ConfigError(f"tp: {self.tp}, expected 1 to {MAX_RANKS}")
        if self.ep < 1 or self.tp % self.ep:
            raise ConfigError(f"ep: {self.ep}, expected a divisor of tp, which is {self.tp}")
        if not 0 <= self.rank < self.tp:
            raise ConfigError(f"rank: {self.rank}, expected 0 to {self.tp - 1}")

    @property
    def meta(self) -> dict[str, str | int]:
        """For people who read a plan."""
        place: dict[str, str | int] = {"tp": self.tp, "ep": self.ep, "rank": self.rank}
        return {**place, "slice": 1} if self.alone else place

    @property
    def exchanges(self) -> bool:
        """Whether partial sums are to be added up over ranks."""
        return self.tp > 1 and not self.alone

    def width(self, size: int, c: ModelConfig) -> Span:
        """Of a dense layer or a shared expert."""
        return _share(size, self.tp, self.rank, _grain(size, self.tp, c))

    def heads(self, c: ModelConfig) -> Span:
        return _share(c.num_attention_heads, self.tp, self.rank)

    def kv_heads(self, c: ModelConfig) -> Span:
        """Those that this rank's query heads read; several ranks have the same one where there are more ranks."""
        first, end = self.heads(c)
        group = c.num_attention_heads // c.num_key_value_heads
        return first // group, (end - 1) // group + 1

    def experts(self, c: ModelConfig) -> Span:
        """Places of experts: ids, unless a placement says otherwise."""
        return _share(c.n_routed_experts, self.ep, self.rank // (self.tp // self.ep))

    def expert_width(self, c: ModelConfig) -> Span:
        ranks = self.tp // self.ep
        width = c.moe_intermediate_size
        return _share(width, ranks, self.rank % ranks, _grain(width, ranks, c))

    def vocab(self, c: ModelConfig) -> Span:
        """Tokens whose logits this rank computes: as even as VOCAB_GRAIN allows."""
        return _share(c.vocab_size, self.tp, self.rank, VOCAB_GRAIN)


WHOLE = Layout()


def _share(size: int, parts: int, index: int, grain: int = 1) -> Span:
    """As even as whole grains allow; the last one may be short."""
    first, end = (grain * (_grains(size, grain) * i // parts) for i in (index, index + 1))
    return first, min(end, size)


def _grains(size: int, grain: int) -> int:
    return -(-size // grain)


def _grain(width: int, parts: int, c: ModelConfig) -> int:
    """Block scales are not cut; other widths are cut evenly where that goes."""
    if c.quantization == "block" and parts > 1:
        return FP8_BLOCK
    return 1 if width % parts == 0 else WIDTH_GRAIN


@dataclass(frozen=True, slots=True)
class Parallelism:
    """What the user asks for. Without `ep`, experts are cut as little as the model allows; `rank_slice` is a rank that
    runs alone; without `placement` experts lie in order of id.
    """

    tp: int = 1
    ep: int | None = None
    rank_slice: int | None = None
    placement: ExpertPlacement | None = None

    def layouts(self, c: ModelConfig) -> tuple[Layout, ...]:
        """Of each rank that runs.

        Raises ConfigError, with the layouts that suit the model, if this one does not, or with what is wrong in the
        placement.
        """
        fitting = [ep for ep in _divisors(self.tp) if next(_problems(Layout(self.tp, ep), c), None) is None]
        ep = max(fitting, default=1) if self.ep is None else self.ep
        check_layout(Layout(self.tp, ep), c)
        if self.placement is not None:
            self.placement.check(c, ep)
        if self.rank_slice is not None:
            return (Layout(self.tp, ep, self.rank_slice, alone=True),)
        return tuple(Layout(self.tp, ep, rank) for rank in range(self.tp))


ONE_RANK = Parallelism()


def check_layout(layout: Layout, c: ModelConfig) -> None:
    """Raises ConfigError, saying what does not divide and which layouts do, if `layout` does not suit the model."""
    problem = next(_problems(layout, c), None)
    if problem is not None:
        raise ConfigError(f"tp={layout.tp} ep={layout.ep}: {problem}; layouts of this model: {_listed(c)}")


def _problems(layout: Layout, c: ModelConfig) -> Iterator[str]:
    tp, inner = layout.tp, layout.tp // layout.ep
    if c.num_attention_heads % tp:
        yield f"num_attention_heads {c.num_attention_heads} is not a multiple of tp"
    if c.num_key_value_heads % tp and tp % c.num_key_value_heads:
        yield f"num_key_value_heads {c.num_key_value_heads} and tp: neither is a multiple of the other"
    if _has_experts(c) and c.n_routed_experts % layout.ep:
        yield f"n_routed_experts {c.n_routed_experts} is not a multiple of ep"
    if c.quantization == "block" and tp > 1 and c.num_attention_heads * c.head_dim // tp % FP8_BLOCK:
        yield f"query heads of a rank do not fill blocks of {FP8_BLOCK}, which share an FP8 scale"
    if c.quantization == "block" and min(tp, c.num_key_value_heads) > 1:
        columns = c.num_key_value_heads * c.head_dim // min(tp, c.num_key_value_heads)
        if columns % FP8_BLOCK:
            yield f"KV heads of a rank do not fill blocks of {FP8_BLOCK}, which share an FP8 scale"
    for name, size, ranks, grain in _shared(c, tp, inner):
        if _grains(size, grain) < ranks:
            yield f"{name} {size} does not hold {grain} for each of {ranks} ranks"


def _shared(c: ModelConfig, tp: int, inner: int) -> Iterator[tuple[str, int, int, int]]:
    """What is divided in grains: name, size, ranks, grain."""
    yield "vocab_size", c.vocab_size, tp, VOCAB_GRAIN
    widths = [("intermediate_size", c.intermediate_size, tp)] if c.first_k_dense_replace else []
    if _has_experts(c):
        widths.append(("moe_intermediate_size", c.moe_intermediate_size, inner))
        if c.n_shared_experts:
            widths.append(("shared experts' width", c.n_shared_experts * c.moe_intermediate_size, tp))
    for name, size, ranks in widths:
        yield name, size, ranks, _grain(size, ranks, c)


def _has_experts(c: ModelConfig) -> bool:
    return c.first_k_dense_replace < c.num_hidden_layers


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listed(c: ModelConfig) -> str:
    fitting = []
    for tp in range(1, MAX_RANKS + 1):
        eps = [str(ep) for ep in _divisors(tp) if next(_problems(Layout(tp, ep), c), None) is None]
        if eps:
            fitting.append(f"tp={tp} ep={'|'.join(eps)}")
    return ", ".join(fitting)
