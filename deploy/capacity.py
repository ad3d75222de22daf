"""What a host of GPUs should hold and do: memory of a rank, room for K and V, tokens a second, by the plan's counts.

The floor is the least time that a rank's bytes and FLOPs take. What a step takes beyond it, a time for each of its
operations, was measured on one H200; an H100, whose memory is slower, took the same (BENCHMARKS.md), so it is assumed
of other GPUs too. So are the sums over ranks, projected from two GPUs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine_worker.models import RankPlans
from engine_worker.plan.cost import floor_seconds, step_cost
from engine_worker.plan.memory import page_bytes, rank_memory
from engine_worker.plan.record import DTYPE_BYTES, Buffer, Plan
from engine_worker.runtime.c_types import PAGE_SIZE


@dataclass(frozen=True)
class Gpu:
    """`memory` in bytes; `read` bytes a second that a kernel reads at best; `flops` of dense FP8.

    An H100's 3.35 TB/s read as 3.06, an H200's 4.8 as 4.04; a B200's data sheet is scaled as the H200's.
    """

    name: str
    memory: float
    read: float
    flops: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 80e9, 3.06e12, 1.979e15),
        Gpu("h200", 141e9, 4.04e12, 1.979e15),
        Gpu("b200", 180e9, 8.0e12 * 4.04 / 4.8, 4.5e15),
    )
}
# (batch, seconds an operation takes beyond its floor on average): rank 0 of eight, 92 layers, context 4,096, one H200.
BEYOND_FLOOR = (
    (1, 2.22e-6),
    (4, 2.27e-6),
    (16, 2.43e-6),
    (32, 2.54e-6),
    (64, 2.72e-6),
    (128, 3.59e-6),
    (256, 5.53e-6),
)
# (bytes, seconds) that a sum over the ranks adds to the norm after it: projected from two GPUs (BENCHMARKS.md).
SUM_SECONDS = (
    (10_240, 2.4e-6),
    (40_960, 3.0e-6),
    (163_840, 3.7e-6),
    (327_680, 4.2e-6),
    (655_360, 5.4e-6),
    (1_310_720, 9.0e-6),
    (2_621_440, 17.0e-6),
)
# Of a GPU's memory, for the context, graphs and kernels' workspace.
_RESERVED = 3e9


@dataclass(frozen=True)
class Capacity:
    """Of one rank: bytes, and tokens of K and V that fit; of the whole: seconds of a decode step, tokens a second."""

    weights: int
    buffers: int
    kv_tokens: int
    floor_s: float
    sums_s: float
    step_s: float
    tokens_per_s: float


def capacity(rank: RankPlans, gpu: Gpu, *, batch: int, context: int, step_tokens: int = 2048) -> Capacity:
    """Decode of `batch` sequences of `context` tokens each. Raises ValueError: they, or the weights, do not fit."""
    memory = rank_memory(
        rank.mixed, rank.decode, tokens=max(step_tokens, batch), samples=batch, pages=0, page_size=PAGE_SIZE
    )
    left = gpu.memory - _RESERVED - memory.total
    per_token = page_bytes(rank.mixed.kv, PAGE_SIZE) / PAGE_SIZE
    kv_tokens = math.floor(left / per_token)
    if kv_tokens < batch * context:
        raise ValueError(
            f"{batch} sequences of {context} tokens need {batch * context * per_token / 1e9:.1f} GB of K and V a rank; "
            f"beside {memory.total / 1e9:.1f} GB of weights and buffers {max(left, 0) / 1e9:.1f} GB are left"
        )
    costs = step_cost(rank.decode, batch, batch, [context] * batch)
    floor_s = floor_seconds(costs, gpu.read, gpu.flops)
    sums_s = sum(_between(SUM_SECONDS, batch * row_bytes) for row_bytes in _summed_rows(rank.decode))
    step_s = floor_s + len(rank.decode.ops) * _between(BEYOND_FLOOR, batch) + sums_s
    return Capacity(memory.weights, memory.buffers, kv_tokens, floor_s, sums_s, step_s, batch / step_s)


def _summed_rows(plan: Plan) -> Iterator[int]:
    """Bytes of a row of each sum over the ranks."""
    for op in plan.ops:
        summed = op.args["x"] if op.kind == "all_reduce" else op.args.get("delta") if op.args.get("reduce") else None
        if isinstance(summed, Buffer):
            yield summed.cols * DTYPE_BYTES[summed.dtype]


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear in log x between measured points, constant beyond them."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return points[-1][1]
