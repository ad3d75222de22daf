"""Rows that start at multiples of 16 bytes may take faster paths: they give the bits of rows that do not."""

import ctypes
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.cases_attention import AttentionCase, AttentionProblem
from tests.kernels.harness import (
    BF16,
    DTYPES,
    F32,
    FP8,
    Array,
    BoundWeight,
    Buffer,
    Chunk,
    Device,
    assert_bits_equal,
    assert_close,
    output,
    tensor,
)
from tests.kernels.matrices import Activations, Format, Weights, random_activations, random_weights

Dtype = np.dtype[Any]
FORMATS = [Format.FP8_CHANNEL, Format.FP8_BLOCK, Format.BF16]


@dataclass(frozen=True)
class Layout:
    """Where matrices lie: `offset` elements past an address that is a multiple of 64, `gap` elements between rows."""

    x_offset: int = 0
    x_gap: int = 0
    weight_offset: int = 0
    weight_gap: int = 0


ALIGNED, PLAIN = Layout(), Layout(x_gap=3, weight_offset=1)


def lay(array: Array, offset: int, gap: int) -> tuple[Buffer, int]:
    """The matrix in memory, and its stride. 0xff, NaN in every float format, lies between its rows."""
    rows, cols = array.shape
    wide = np.full((rows, (cols + gap) * array.dtype.itemsize), 0xFF, np.uint8).view(array.dtype)
    wide[:, :cols] = array
    return Buffer(wide, offset * array.dtype.itemsize), cols + gap


def run(device: Device, x: Activations, weights: Weights, layout: Layout, out_dtype: Dtype = F32) -> Array:
    return run_parts(device, x, [weights], layout, out_dtype)


def run_parts(
    device: Device, x: Activations, parts: list[Weights], layout: Layout, out_dtype: Dtype, out_gap: int = 0
) -> Array:
    rows, k = x.data.shape
    bound_x, x_stride = lay(x.data, layout.x_offset, layout.x_gap)
    x_scale = None if x.scale is None else tensor(x.scale)
    cols = sum(part.data.shape[0] for part in parts)
    out = output(rows, cols, out_dtype, cols + out_gap)
    args = abi.LinearArgs(rows, len(parts), parts[0].format)
    args.x = abi.Tensor(bound_x.pointer, DTYPES[x.data.dtype], k, x_stride)
    if x_scale is not None:
        args.x_scale = x_scale.struct
    bound = []
    for i, part in enumerate(parts):
        data, stride = lay(part.data, layout.weight_offset, layout.weight_gap)
        scale = None if part.scale is None else Buffer(part.scale)
        bound.append((data, scale))
        scale_stride = 0 if part.format != Format.FP8_BLOCK or scale is None else scale.shape[1]
        args.parts[i] = abi.Weight(data.pointer, stride, scale and scale.pointer, scale_stride, part.data.shape[0])
    args.out = out.struct
    device.run(abi.Op.LINEAR, args)
    return out.read()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("out_dtype,tolerance", [(F32, 1e-5), (BF16, 2**-8)], ids=["f32", "bf16"])
@pytest.mark.parametrize("n,k", [(48, 64), (200, 640), (17, 48), (384, 1536), (40, 4224)])
def test_linear(
    device: Device, rng: np.random.Generator, fmt: Format, n: int, k: int, out_dtype: Dtype, tolerance: float
) -> None:
    x, weights = random_activations(rng, fmt, 300, k, BF16), random_weights(rng, fmt, n, k)
    plain = run(device, x, weights, PLAIN, out_dtype)
    assert_close(plain, x.value @ weights.value.T, tolerance)
    for rows in (0, 1, 8, 9, 16, 17, 33, 64, 70, 129, 300):
        assert_bits_equal(run(device, x.rows(slice(300 - rows, 300)), weights, ALIGNED, out_dtype), plain[300 - rows :])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("rows", [0, 1, 9, 64, 300])
@pytest.mark.parametrize("elements", [1, 8, 16])
def test_linear_where_one_thing_is_off(
    device: Device, rng: np.random.Generator, fmt: Format, rows: int, elements: int
) -> None:
    """Off by one element, 8 or 16: rows narrower than a copy of 128 bytes, and wider."""
    for k in (48, 320):
        x, weights = random_activations(rng, fmt, rows, k, BF16), random_weights(rng, fmt, 40, k)
        plain = run(device, x, weights, PLAIN, BF16)
        assert_close(plain, x.value @ weights.value.T, 2**-8)
        for thing in fields(Layout):
            assert_bits_equal(run(device, x, weights, Layout(**{thing.name: elements}), BF16), plain)


def test_wide_linear(device: Device, rng: np.random.Generator) -> None:
    x, weights = random_activations(rng, Format.BF16, 35, 192, BF16), random_weights(rng, Format.BF16, 16450, 192)
    plain = run(device, x, weights, PLAIN)
    for rows in (0, 1, 10, 20, 35):
        assert_bits_equal(run(device, x.rows(slice(35 - rows, 35)), weights, ALIGNED), plain[35 - rows :])


MANY_ROWS = [
    # Wide tiles; a split of K that wide tiles follow; no full tile at a part's end.
    (Format.FP8_CHANNEL, (5128,), 192),
    (Format.FP8_CHANNEL, (1544, 120, 128), 2048),
    (Format.FP8_CHANNEL, (4608, 72, 136), 320),
    # K split 4 ways, not at all, and 8 ways.
    (Format.BF16, (2744, 120, 128), 1024),
    (Format.BF16, (12680,), 200),
    (Format.BF16, (600,), 4096),
]
ROWS = (1, 64, 65, 96, 128, 129, 200, 256, 257, 330, 700)
HOST_ROWS = (1, 65, 200)  # a host multiplies up to 128 at once


@pytest.mark.parametrize("fmt,sizes,k", MANY_ROWS, ids=str)
@pytest.mark.parametrize("out_gap", [0, 3, 8])
def test_linear_of_many_rows(
    device: Device, rng: np.random.Generator, fmt: Format, sizes: tuple[int, ...], k: int, out_gap: int
) -> None:
    *_, most = counts = HOST_ROWS if device.table.on_host else ROWS
    x = random_activations(rng, fmt, most, k, BF16)
    parts = [random_weights(rng, fmt, n, k) for n in sizes]
    plain = run_parts(device, x, parts, PLAIN, BF16)
    assert_close(plain[::13], x.value[::13] @ np.concatenate([part.value for part in parts]).T, 2**-8)
    for rows in counts:
        last = x.rows(slice(most - rows, most))
        assert_bits_equal(run_parts(device, last, parts, ALIGNED, BF16, out_gap), plain[most - rows :])


@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(12, 1, 128), (3, 1, 128), (16, 1, 64), (40, 2, 128), (8, 4, 64)])
def test_attention_of_bf16_rows(
    device: Device, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int, kv: "np.dtype[np.generic]"
) -> None:
    spans = [(0, 1), (15, 2), (63, 1), (64, 1), (510, 4), (1100, 2)]
    problem = AttentionProblem(AttentionCase(heads, kv_heads, head_dim, spans, kv, BF16), rng)
    crowd = problem.run(device, problem.chunks())
    for chunk, together in zip(problem.chunks(), crowd, strict=True):
        assert_close(together, problem.expected(chunk), 2**-6)
        for row in range(chunk.length):
            alone = problem.run(device, [Chunk(chunk.slot, chunk.start + row, 1)])[0]
            assert_bits_equal(alone, together[row : row + 1])


def test_attention_over_a_long_context(device: Device, rng: np.random.Generator) -> None:
    problem = AttentionProblem(AttentionCase(12, 1, 128, [(16382, 4)], BF16, BF16), rng)
    together = problem.run(device, problem.chunks())[0]
    assert_close(together, problem.expected(problem.chunks()[0]), 2**-6)
    alone = [problem.run(device, [Chunk(0, 16382 + row, 1)])[0] for row in range(4)]
    assert_bits_equal(np.concatenate(alone), together)


def test_attention_of_many_bf16_rows(device: Device, rng: np.random.Generator) -> None:
    problem = AttentionProblem(AttentionCase(12, 1, 128, [(400, 300)], BF16, BF16), rng)
    whole = problem.run(device, problem.chunks())[0]
    assert_close(whole, problem.expected(problem.chunks()[0]), 2**-6)
    parts = [problem.run(device, [Chunk(0, 400 + start, 100)])[0] for start in range(0, 300, 100)]
    assert_bits_equal(np.concatenate(parts), whole)


def expert_weights(experts: list[Weights], offset: int) -> tuple[abi.ExpertWeights, list[object]]:
    """The struct, and what must outlive it. `offset`: bytes past an address that is a multiple of 64."""
    kept: list[object] = []
    structs = (abi.Weight * len(experts))()
    for i, one in enumerate(experts):
        bound = BoundWeight(Buffer(one.data, offset), None if one.scale is None else Buffer(one.scale))
        kept.append(bound)
        structs[i] = bound.struct
    array = Buffer(np.frombuffer(ctypes.string_at(structs, ctypes.sizeof(structs)), np.uint8))
    rows, cols = experts[0].data.shape
    return abi.ExpertWeights(array.pointer, experts[0].format, 0, len(experts), rows, cols), [*kept, array]


class Experts:
    """Two experts of the same shape; the first has `first` of the tokens, one assignment a token."""

    def __init__(self, rng: np.random.Generator, fmt: Format, tokens: int, first: int) -> None:
        self.gate, self.up = ([random_weights(rng, fmt, 208, 256) for _ in range(2)] for _ in range(2))
        self.x = random_activations(rng, fmt, tokens, 256, BF16)
        self.ids = (np.arange(tokens) >= first).astype(np.int32)[:, None]
        self.offsets = np.array([0, first, tokens], np.int32)

    def bind(self, offset: int) -> tuple[abi.Tensor, abi.Tensor, list[object]]:
        x = tensor(self.x.data, 256 if offset == 0 else 259)
        scale = None if self.x.scale is None else tensor(self.x.scale)
        return x.struct, abi.Tensor() if scale is None else scale.struct, [x, scale]

    def run_gate_up(self, device: Device, offset: int) -> list[Array]:
        """Its outputs, and where the format has a scale a row these quantised."""
        x, scale, kept = self.bind(offset)
        (gate, kept_gate), (up, kept_up) = expert_weights(self.gate, offset), expert_weights(self.up, offset)
        rows = len(self.ids)
        offsets, order, out = Buffer(self.offsets), Buffer(np.arange(rows, dtype=np.int32)), output(rows, 208, BF16)
        q, q_scale = output(rows, 208, FP8), output(rows, 1, F32)
        args = abi.MoeGateUpArgs(rows, 1, x, scale, gate, up, offsets.pointer, order.pointer, out.struct)
        if self.gate[0].format == Format.FP8_CHANNEL:
            args.q, args.scale = q.struct, q_scale.struct
        device.run(abi.Op.MOE_GATE_UP, args)
        del kept, kept_gate, kept_up
        return [out.read(), q.read(), q_scale.read()]

    def run_down(self, device: Device, offset: int) -> Array:
        x, scale, kept = self.bind(offset)
        down, kept_down = expert_weights(self.gate, offset)
        rows = len(self.ids)
        offsets, order, out = Buffer(self.offsets), Buffer(np.arange(rows, dtype=np.int32)), output(rows, 208, BF16)
        ids, weights = tensor(self.ids), tensor(np.ones((rows, 1), F32))
        args = abi.MoeDownArgs(rows, 1, x, scale, down, offsets.pointer, order.pointer, ids.struct, weights.struct)
        args.out = out.struct
        device.run(abi.Op.MOE_DOWN, args)
        del kept, kept_down
        return out.read()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize(
    "tokens,first", [(0, 0), (2, 1), (24, 9), (70, 33), (200, 65), (1100, 3), (1400, 0), (1300, 300), (2000, 900)]
)
def test_experts(device: Device, rng: np.random.Generator, fmt: Format, tokens: int, first: int) -> None:
    problem = Experts(rng, fmt, tokens, first)
    element = problem.gate[0].data.dtype.itemsize
    for aligned, plain in zip(problem.run_gate_up(device, 0), problem.run_gate_up(device, element), strict=True):
        assert_bits_equal(aligned, plain)
    assert_bits_equal(problem.run_down(device, 0), problem.run_down(device, element))
