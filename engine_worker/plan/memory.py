"""What a rank keeps in memory, from its plans alone."""

from __future__ import annotations

from dataclasses import dataclass

from engine_worker.plan.cost import held_bytes
from engine_worker.plan.record import DTYPE_BYTES, Buffer, KvCache, Plan
from engine_worker.weights.records import Weight


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes. `buffers` are the plans' own; the kernels' workspace comes on top."""

    weights: int
    kv_pages: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_pages + self.buffers


def page_bytes(kv: KvCache, page_size: int) -> int:
    """Of one KV page, in all layers."""
    return page_size * 2 * kv.layers * kv.kv_heads * kv.head_dim * DTYPE_BYTES[kv.dtype]


def rank_memory(mixed: Plan, decode: Plan, *, tokens: int, samples: int, pages: int, page_size: int) -> RankMemory:
    """Of a rank with these plans, whose steps have at most `tokens` rows and `samples` samples."""
    named = {operand.name: operand for plan in (mixed, decode) for operand in plan.operands}
    buffers = [value for value in named.values() if isinstance(value, Buffer)]
    return RankMemory(
        weights=sum(held_bytes(value) for value in named.values() if isinstance(value, Weight)),
        kv_pages=pages * page_bytes(mixed.kv, page_size),
        buffers=sum(b.rows.count(tokens, samples) * b.cols * DTYPE_BYTES[b.dtype] for b in buffers),
    )
