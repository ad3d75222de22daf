"""Expert layers one after another, as a step submits them: grouping, gate/up and down, nothing waited for."""

import ctypes
from copy import copy
from typing import Self

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.expert_calls import routed_experts
from tests.kernels.harness import (
    ABSENT,
    BF16,
    F32,
    FP8,
    I32,
    Array,
    Buffer,
    Device,
    assert_bits_equal,
    output,
    poison,
    tensor,
)
from tests.kernels.matrices import FP8_FORMATS, BoundExperts, Format, random_activations, random_weights
from tests.kernels.test_moe import Down, GateUp, random_ids

HIDDEN, INNER, EXPERTS, TOP_K = 640, 256, 12, 4


class Layers:
    """Layers with tokens of their own, which share the buffers of the grouping and of the quantised activations."""

    def __init__(self, device: Device, rng: np.random.Generator, rows: int, count: int) -> None:
        self.device = device
        fmt = Format.FP8_CHANNEL
        self.weights = [
            BoundExperts([random_weights(rng, fmt, n, k, gap=0) for _ in range(EXPERTS)], 0)
            for n, k in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        ]
        self.tokens = [
            (random_activations(rng, fmt, rows, HIDDEN, BF16), random_ids(rng, rows, 2 * EXPERTS, TOP_K))
            for _ in range(count)
        ]
        self.mix = rng.random((rows, TOP_K)).astype(np.float32)
        self._bind(slice(0, rows))

    def of_rows(self, rows: slice) -> Self:
        """The same layers of some of the tokens."""
        part = copy(self)
        part._bind(rows)
        return part

    def _bind(self, rows: slice) -> None:
        self.x = [x.rows(rows).bind() for x, _ in self.tokens]
        self.ids = [tensor(ids[rows]) for _, ids in self.tokens]
        self.mixed = tensor(self.mix[rows])
        self.rows = rows.stop - rows.start
        self._make_buffers(self.rows)

    def _make_buffers(self, rows: int) -> None:
        self.offsets, self.order = Buffer(poison((EXPERTS + 1,), I32)), Buffer(poison((rows * TOP_K,), I32))
        self.q, self.scale = output(rows * TOP_K, INNER, FP8), output(rows * TOP_K, 1, F32)

    def ops(self, layer: int, out: abi.Tensor) -> list[tuple[abi.Op, ctypes.Structure]]:
        ids, x, offsets, order = self.ids[layer], self.x[layer], self.offsets, self.order
        inner = (abi.Tensor(None, abi.Dtype.BF16, INNER, INNER), self.q.struct, self.scale.struct)
        group = abi.MoeGroupArgs(self.rows, ids.struct, TOP_K, 0, EXPERTS, offsets.pointer, order.pointer)
        choice, given = (ids, self.mixed), (x.x.struct, x.scale_struct)
        return [
            (abi.Op.MOE_GROUP, group),
            *routed_experts(self.weights, (offsets, order), choice, given, inner, ABSENT, out),
        ]

    def run(self, waiting: bool) -> list[Array]:
        outs = [output(self.rows, HIDDEN, BF16) for _ in self.x]
        ops = [op for layer, out in enumerate(outs) for op in self.ops(layer, out.struct)]
        size = max(
            self.device.table.kernels.workspace_bytes(self.device.handle, op, ctypes.byref(args)) for op, args in ops
        )
        workspace = Buffer(poison((size,), np.uint8))
        self.device.table.kernels.set_workspace(self.device.handle, workspace.pointer, size)
        for op, args in ops:
            # Gate and up that run a second time do not follow the grouping.
            for _ in range(2 if waiting and op == abi.Op.MOE_GATE_UP else 1):
                assert self.device.call(op, args) == abi.Status.OK
                if waiting:
                    self.device.memory.wait()
        self.device.memory.wait()
        return [out.read() for out in outs]


@pytest.mark.parametrize("rows", [1, 3, 16, 70])
def test_layers_do_not_see_each_other(device: Device, rng: np.random.Generator, rows: int) -> None:
    layers = Layers(device, rng, rows, 6)
    expected = layers.run(waiting=True)
    for _ in range(5):
        for got, want in zip(layers.run(waiting=False), expected, strict=True):
            assert_bits_equal(got, want)


def test_few_rows_have_the_bits_of_many(device: Device, rng: np.random.Generator) -> None:
    many = Layers(device, rng, 40, 2)
    expected = many.run(waiting=False)
    for begin, end in [(0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (15, 22), (22, 30), (31, 32)]:
        few = many.of_rows(slice(begin, end))
        for got, want in zip(few.run(waiting=False), expected, strict=True):
            assert_bits_equal(got, want[begin:end])


@pytest.mark.parametrize("rows", [16, 33, 64, 120])
def test_all_tokens_on_one_expert_behind_their_grouping(device: Device, rng: np.random.Generator, rows: int) -> None:
    layers = Layers(device, rng, rows, 4)
    for i in range(len(layers.ids)):
        ids = 1 + random_ids(rng, rows, 2 * EXPERTS - 1, TOP_K)
        ids[:, 0] = 0
        layers.ids[i] = tensor(ids)
    expected = layers.run(waiting=True)
    for _ in range(5):
        for got, want in zip(layers.run(waiting=False), expected, strict=True):
            assert_bits_equal(got, want)


@pytest.mark.parametrize("fmt", [Format.FP8_CHANNEL, Format.FP8_BLOCK], ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("hidden", [520, 5120])
def test_one_expert_alone_has_the_bits_of_a_batch(
    device: Device, rng: np.random.Generator, fmt: Format, hidden: int
) -> None:
    problem = GateUp(rng, fmt, hidden, 72, experts=1, first=0)
    x, ids = random_activations(rng, fmt, 20, hidden, BF16), np.zeros((20, 1), np.int32)
    whole = problem.run(device, x, ids, BF16, 0)[0]
    for begin, end in [(0, 1), (7, 9), (16, 20)]:
        part = problem.run(device, x.rows(slice(begin, end)), ids[begin:end], BF16, 0)[0]
        assert_bits_equal(part, whole[begin:end])


@pytest.mark.parametrize("most", [16, 32, 33, 100])
@pytest.mark.parametrize("fmt", [Format.BF16, *FP8_FORMATS], ids=lambda fmt: fmt.name.lower())
def test_experts_of_few_and_of_many_tokens_share_blocks(
    device: Device, other_device: Device, rng: np.random.Generator, fmt: Format, most: int
) -> None:
    """More tiles than blocks, of an odd number of steps; some experts have `most` tokens, others fewer."""
    experts, hidden, inner, rows, count = 22, 384, 1536, 100, 2048
    up, down = GateUp(rng, fmt, hidden, inner, experts, 0), Down(rng, fmt, hidden, count, experts, 0)
    for expert in range(experts):  # aligned
        up.gate[expert].gap = up.up[expert].gap = down.down[expert].gap = 0
    row = np.arange(rows)
    ids = np.stack([row // most, 7 + row % 7, 14 + row % 8], 1).astype(np.int32)
    x = random_activations(rng, fmt, rows, hidden, BF16)
    spread = random_activations(rng, fmt, rows * 3, hidden, BF16)
    mixed = rng.random((rows, 3)).astype(np.float32)
    whole, whole_down = up.run(device, x, ids, BF16, 0)[0], down.run(device, spread, ids, mixed, None, BF16, False)
    assert np.isfinite(whole.astype(np.float32)).all()
    for begin, end in [(0, 1), (38, 42), (55, 75), (1, 99)]:
        some, each = slice(begin, end), slice(begin * 3, end * 3)
        part = up.run(other_device, x.rows(some), ids[some], BF16, 0)[0]
        assert_bits_equal(part, whole[each])
        part = down.run(other_device, spread.rows(each), ids[some], mixed[some], None, BF16, False)
        assert_bits_equal(part, whole_down[some])
