"""Attention problems: sequences with their K and V, laid out in pages of shuffled ids; unwritten tokens hold NaN."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels import abi, oracle
from tests.kernels.harness import (
    BF16,
    DTYPES,
    F32,
    FP8,
    Array,
    Buffer,
    Chunk,
    Device,
    F64Array,
    SlotState,
    Step,
    output,
    poison,
    tensor,
)


@dataclass(frozen=True)
class AttentionCase:
    """`spans`: for each sequence in the batch its keys before this step and its rows in this step."""

    heads: int
    kv_heads: int
    head_dim: int
    spans: Sequence[tuple[int, int]]
    kv_dtype: "np.dtype[Any]" = BF16
    act: "np.dtype[Any]" = F32

    def __str__(self) -> str:
        spans = "_".join(f"{before}+{rows}" for before, rows in self.spans)
        return f"h{self.heads}k{self.kv_heads}d{self.head_dim}-{self.kv_dtype}-{self.act}-{spans}"


ALL_RATIOS = [(1, 1), (4, 4), (3, 1), (9, 3), (8, 2), (16, 2), (12, 1), (24, 2), (32, 2), (5, 1)]
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 511, 512, 513, 1023, 1025]

CASES = [
    *(AttentionCase(h, k, 64, [(40, 1), (0, 19)]) for h, k in ALL_RATIOS),
    *(AttentionCase(6, 2, d, [(33, 1), (0, 17), (16, 16)]) for d in (8, 16, 24, 40, 64, 72, 96, 128, 256)),
    *(
        AttentionCase(4, 2, 64, [(20, 3), (0, 1)], kv, act)
        for kv in DTYPES
        if kv.kind in "fV"
        for act in (F32, BF16)
        if kv != np.float16
    ),
    *(AttentionCase(3, 1, 32, [(n - 1, 1)]) for n in EDGES),
    *(AttentionCase(3, 1, 32, [(0, n)]) for n in EDGES),
    AttentionCase(9, 3, 64, [(1500, 1), (0, 1), (511, 1), (512, 1), (7, 1), (640, 3)]),
    AttentionCase(3, 3, 64, [(500, 40), (0, 100), (3, 1)]),
    AttentionCase(2, 1, 16, []),
    # Chunks of many rows and decode rows in one step, and lengths where the CUDA table's splits end.
    *(
        AttentionCase(h, k, d, [(0, 65), (130, 1), (256, 70), (0, 1), (700, 2)], kv, BF16)
        for h, k, d in [(12, 1, 128), (5, 1, 128), (16, 2, 64), (32, 2, 128)]
        for kv in (BF16, FP8)
    ),
    AttentionCase(12, 1, 128, [(255, 1), (256, 1), (2047, 1), (2048, 1), (2300, 1), (4700, 1)], BF16, BF16),
    AttentionCase(12, 1, 128, [(2040, 40)], BF16, BF16),
]


class AttentionProblem:
    """A case with random data; every sequence may be run as a whole or in parts, alone or among others."""

    def __init__(self, case: AttentionCase, rng: np.random.Generator) -> None:
        self.case = case
        self.scale = case.head_dim**-0.5
        self.lengths = [before + rows for before, rows in case.spans]
        self.q, self.k, self.v = [], [], []
        for length in self.lengths:
            self.q.append(rng.standard_normal((length, case.heads, case.head_dim)).astype(case.act))
            shape = (case.kv_heads, length, case.head_dim)
            self.k.append((2 * rng.standard_normal(shape)).astype(case.kv_dtype))
            self.v.append(rng.standard_normal(shape).astype(case.kv_dtype))
        self._lay_out_pages(rng)

    def _lay_out_pages(self, rng: np.random.Generator) -> None:
        case = self.case
        pages = [-(-length // abi.PAGE_SIZE) for length in self.lengths]
        total = sum(pages) + 1
        ids = iter(rng.permutation(total))
        self.page_table = np.full((len(pages) + 1, max([*pages, 1])), -1, np.int32)
        shape = (total, case.kv_heads, abi.PAGE_SIZE, case.head_dim)
        self.k_pages, self.v_pages = poison(shape, case.kv_dtype), poison(shape, case.kv_dtype)
        for slot, (length, count) in enumerate(zip(self.lengths, pages, strict=True)):
            for index in range(count):
                page, begin = next(ids), index * abi.PAGE_SIZE
                end = min(length, begin + abi.PAGE_SIZE)
                self.page_table[slot, index] = page
                self.k_pages[page, :, : end - begin] = self.k[slot][:, begin:end]
                self.v_pages[page, :, : end - begin] = self.v[slot][:, begin:end]

    def chunks(self) -> list[Chunk]:
        return [Chunk(slot, before, rows) for slot, (before, rows) in enumerate(self.case.spans)]

    def run(self, device: Device, chunks: Sequence[Chunk]) -> list[Array]:
        """One step over these chunks: for each its output, [rows][heads * head_dim]."""
        case, step = self.case, Step(chunks)
        cols = case.heads * case.head_dim
        queries = [self.q[c.slot][c.start : c.start + c.length].reshape(c.length, cols) for c in chunks]
        q = tensor(np.concatenate([*queries, np.zeros((0, cols), case.act)]), cols + 16)
        out = output(step.rows, cols, case.act, cols + 8)
        slots, bound = SlotState(self.page_table).bind(), step.bind()
        k, v = Buffer(self.k_pages), Buffer(self.v_pages)
        kv = abi.KvLayer(k.pointer, v.pointer, DTYPES[case.kv_dtype], case.kv_heads, case.head_dim)
        args = abi.PagedAttentionArgs(rows=step.rows, q=q.struct, kv=kv, heads=case.heads, out=out.struct)
        args.step.contents, args.slots.contents = bound.struct, slots.struct
        args.softmax_scale = self.scale
        device.run(abi.Op.PAGED_ATTENTION, args)
        return np.split(out.read(), step.seq_starts[1:-1]) if len(chunks) else []

    def expected(self, chunk: Chunk) -> F64Array:
        rows = slice(chunk.start, chunk.start + chunk.length)
        positions = np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32)
        q, k, v = self.q[chunk.slot][rows], self.k[chunk.slot], self.v[chunk.slot]
        return oracle.attention(q, k, v, positions, self.scale).reshape(chunk.length, -1)
