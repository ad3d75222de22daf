"""The calls of a layer's routed experts, as a step has them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from tests.kernels import abi
from tests.kernels.harness import ABSENT, BoundTensor, Buffer
from tests.kernels.matrices import BoundExperts


def routed_experts(
    experts: Sequence[BoundExperts],
    grouping: tuple[Buffer, Buffer],
    choice: tuple[BoundTensor, BoundTensor],
    x: tuple[abi.Tensor, abi.Tensor],
    inner: tuple[abi.Tensor, abi.Tensor, abi.Tensor],
    base: abi.Tensor,
    out: abi.Tensor,
) -> list[tuple[abi.Op, ctypes.Structure]]:
    """`experts`: gate, up and down; `grouping`: offsets and order; `choice`: ids and weights [rows][top_k]; `x`: with
    its scale; `inner`: gate and up's output, quantised output and scale, of which down takes the quantised one unless
    it is absent. What is absent is ABSENT."""
    gate, up, down = (one.struct for one in experts)
    ids, weights = choice
    rows, top_k = ids.buffer.shape[0], ids.cols
    plain, q, scale = inner
    first = abi.MoeGateUpArgs(rows, top_k, *x, gate, up)
    first.out, first.q, first.scale = plain, q, scale
    second = abi.MoeDownArgs(rows, top_k, *((q, scale) if q.data else (plain, ABSENT)), down)
    second.ids, second.weights, second.base, second.out = ids.struct, weights.struct, base, out
    for args in (first, second):
        args.offsets, args.order = (buffer.pointer for buffer in grouping)
    return [(abi.Op.MOE_GATE_UP, first), (abi.Op.MOE_DOWN, second)]
