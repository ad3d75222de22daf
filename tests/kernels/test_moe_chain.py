"""Expert layers one after another, as a step submits them: grouping, gate/up and down, nothing waited for."""

import ctypes

import numpy as np
import pytest

from tests.kernels import abi
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
from tests.kernels.matrices import BoundExperts, Format, random_activations, random_weights
from tests.kernels.test_moe import GateUp, random_ids

HIDDEN, INNER, EXPERTS, TOP_K = 640, 256, 12, 4


class Layers:
    """Layers with tokens of their own, which share the buffers of the grouping and of the quantised activations."""

    def __init__(self, device: Device, rng: np.random.Generator, rows: int, count: int) -> None:
        self.device, self.rows = device, rows
        fmt = Format.FP8_CHANNEL
        self.weights = [
            BoundExperts([random_weights(rng, fmt, n, k, gap=0) for _ in range(EXPERTS)], 0)
            for n, k in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        ]
        self.x = [random_activations(rng, fmt, rows, HIDDEN, BF16).bind() for _ in range(count)]
        self.ids = [tensor(random_ids(rng, rows, 2 * EXPERTS, TOP_K)) for _ in range(count)]
        self.mixed = tensor(rng.random((rows, TOP_K)).astype(np.float32))
        self.offsets, self.order = Buffer(poison((EXPERTS + 1,), I32)), Buffer(poison((rows * TOP_K,), I32))
        self.q, self.scale = output(rows * TOP_K, INNER, FP8), output(rows * TOP_K, 1, F32)

    def ops(self, layer: int, out: abi.Tensor) -> list[tuple[abi.Op, ctypes.Structure]]:
        rows, ids, x = self.rows, self.ids[layer].struct, self.x[layer]
        offsets, order = self.offsets.pointer, self.order.pointer
        gate, up, down = (experts.struct for experts in self.weights)
        none = abi.Tensor(None, abi.Dtype.BF16, INNER, INNER)
        first = abi.MoeGateUpArgs(rows, TOP_K, x.x.struct, x.scale_struct, gate, up)
        first.offsets, first.order, first.out, first.q, first.scale = (
            offsets,
            order,
            none,
            self.q.struct,
            self.scale.struct,
        )
        second = abi.MoeDownArgs(rows, TOP_K, self.q.struct, self.scale.struct, down)
        second.offsets, second.order, second.ids, second.weights = offsets, order, ids, self.mixed.struct
        second.base, second.out = ABSENT, out
        return [
            (abi.Op.MOE_GROUP, abi.MoeGroupArgs(rows, ids, TOP_K, 0, EXPERTS, offsets, order)),
            (abi.Op.MOE_GATE_UP, first),
            (abi.Op.MOE_DOWN, second),
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
