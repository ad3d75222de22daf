"""Calls that follow each other as in a layer with experts, where neighbours may run side by side and a graph may have
branches, give what they give one by one.

A round is `norm; route; gate_up, silu_mul and down of the shared expert; group; gate_up and down of the routed
experts`, or has these in another order, or others among them, and its norm adds what the round before it wrote: a call
that starts too early, or ends unseen, changes the bits of all rounds to come.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Self

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.expert_calls import routed_experts
from tests.kernels.graphs import has_graphs, record
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
from tests.kernels.matrices import BoundExperts, Format, Weights, random_weights

HIDDEN, WIDTH, EXPERTS, TOP_K, FIRST, LOCAL = 1024, 192, 160, 8, 40, 20
ROUNDS = 12
MIXED_ORDER = "norm gate_up route silu_mul down group experts_up experts_down"
DECODE_ORDER = "norm route gate_up silu_mul down group experts_up experts_down"
ORDERS = [
    MIXED_ORDER,
    DECODE_ORDER,
    "norm gate_up route silu_mul group down experts_up experts_down",
    "norm route gate_up group silu_mul down experts_up experts_down",
]
GRAPH_ORDERS = [
    *ORDERS,
    "norm route gate_up silu_mul quantize_hidden down group experts_up experts_down",
    "norm route group gate_up silu_mul experts_up linear_of_experts down experts_down",
    "norm route gate_up silu_mul down group experts_of_hidden experts_up experts_down",
]
REPLAYS = 3


class AlignedWeight:
    """As most checkpoints have them: rows start at multiples of 16 bytes."""

    def __init__(self, weights: Weights) -> None:
        self._data = Buffer(weights.data)
        self._scale = None if weights.scale is None else Buffer(weights.scale)

    @property
    def struct(self) -> abi.Weight:
        rows, cols = self._data.shape
        return abi.Weight(self._data.pointer, cols, self._scale and self._scale.pointer, 0, rows)


@cache
def random_layer(fmt: Format) -> tuple[list[Weights], list[list[Weights]]]:
    """gate_up, router and down; and of the experts gate, up, down, and square ones."""
    rng = np.random.default_rng(7)
    matrices = [(fmt, 2 * WIDTH, HIDDEN), (Format.F32, EXPERTS, HIDDEN), (fmt, HIDDEN, WIDTH)]
    experts = [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH, WIDTH)]
    return (
        [random_weights(rng, *matrix) for matrix in matrices],
        [[random_weights(rng, fmt, *shape) for _ in range(LOCAL)] for shape in experts],
    )


class Layer:
    """Weights, a residual stream, and the calls of a round, bound to one set of buffers."""

    def __init__(self, fmt: Format, rows: int, order: str = MIXED_ORDER) -> None:
        rng = np.random.default_rng(8)
        matrices, experts = random_layer(fmt)
        self.bound = [AlignedWeight(weights) for weights in matrices]
        *self.experts, self.square = (BoundExperts(weights, FIRST) for weights in experts)
        self.bias = Buffer(rng.standard_normal(EXPERTS).astype(np.float32) * 0.01)
        self.norm = Buffer(rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
        self.residual = tensor(rng.standard_normal((rows, HIDDEN)).astype(BF16))
        self.delta = tensor(rng.standard_normal((rows, HIDDEN)).astype(BF16))
        self.x, self.x_q, self.x_scale = (
            output(rows, cols, t) for cols, t in ((HIDDEN, BF16), (HIDDEN, FP8), (1, F32))
        )
        self.gate_up = output(rows, 2 * WIDTH, BF16)
        self.hidden, self.hidden_q = output(rows, WIDTH, BF16), output(rows, WIDTH, FP8)
        self.hidden_scale = output(rows, 1, F32)
        self.shared = output(rows, HIDDEN, BF16)
        self.hidden_again, self.scale_again = output(rows, WIDTH, FP8), output(rows, 1, F32)
        self.of_experts = output(rows, HIDDEN, BF16)
        self.inner_of_hidden = output(rows * TOP_K, WIDTH, BF16)
        self.inner, self.inner_q = output(rows * TOP_K, WIDTH, BF16), output(rows * TOP_K, WIDTH, FP8)
        self.inner_scale = output(rows * TOP_K, 1, F32)
        self.ids, self.expert_weights = output(rows, TOP_K, I32), output(rows, TOP_K, F32)
        self.offsets, self.order = Buffer(poison((LOCAL + 1,), I32)), Buffer(poison((rows * TOP_K,), I32))
        calls = self._calls(rows, fmt) | self._routed_experts(fmt) | self._others(rows, fmt)
        self.calls = [calls[name] for name in order.split()]

    def _linear(self, rows: int, fmt: Format, forms: list[Any], weight: int, out: Any) -> abi.LinearArgs:
        plain, q, scale = (form.struct for form in forms)
        x = (q, scale) if fmt == Format.FP8_CHANNEL else (plain, ABSENT)
        args = abi.LinearArgs(rows, 1, fmt, *x)
        args.parts[0], args.out = self.bound[weight].struct, out.struct
        return args

    def _calls(self, rows: int, fmt: Format) -> dict[str, tuple[abi.Op, Any]]:
        x, hidden = [self.x, self.x_q, self.x_scale], [self.hidden, self.hidden_q, self.hidden_scale]
        norm = abi.RmsNormArgs(rows, self.residual.struct, self.delta.struct, self.norm.pointer, 1e-5)
        norm.out, norm.q, norm.scale = (form.struct for form in x)
        route = abi.MoeRouteArgs(rows, self.x.struct, self.bound[1].struct, Format.F32, self.bias.pointer)
        route.experts, route.top_k, route.groups, route.topk_groups = EXPERTS, TOP_K, 1, 1
        route.normalize, route.scale = 1, 2.5
        route.ids, route.weights = self.ids.struct, self.expert_weights.struct
        group = abi.MoeGroupArgs(rows, self.ids.struct, TOP_K, FIRST, LOCAL, self.offsets.pointer, self.order.pointer)
        return {
            "norm": (abi.Op.RMS_NORM, norm),
            "gate_up": (abi.Op.LINEAR, self._linear(rows, fmt, x, 0, self.gate_up)),
            "route": (abi.Op.MOE_ROUTE, route),
            "silu_mul": (
                abi.Op.SILU_MUL,
                abi.SiluMulArgs(rows, self.gate_up.struct, *(form.struct for form in hidden)),
            ),
            "down": (abi.Op.LINEAR, self._linear(rows, fmt, hidden, 2, self.shared)),
            "group": (abi.Op.MOE_GROUP, group),
        }

    def _others(self, rows: int, fmt: Format) -> dict[str, tuple[abi.Op, Any]]:
        """Two that read what the shared expert has written, of which the second could else begin before the grouping
        ends; and one that could run beside the shared expert if it did not read what the routed experts have written.
        """
        hidden = self.hidden.struct, self.hidden_again.struct, self.scale_again.struct
        x = (self.hidden_q.struct, self.hidden_scale.struct) if fmt == Format.FP8_CHANNEL else (hidden[0], ABSENT)
        up = abi.MoeGateUpArgs(rows, TOP_K, *x, self.square.struct, self.square.struct)
        up.offsets, up.order, up.out = self.offsets.pointer, self.order.pointer, self.inner_of_hidden.struct
        inner = [self.inner, self.inner_q, self.inner_scale]
        return {
            "quantize_hidden": (abi.Op.QUANTIZE, abi.QuantizeArgs(rows, *hidden)),
            "experts_of_hidden": (abi.Op.MOE_GATE_UP, up),
            "linear_of_experts": (abi.Op.LINEAR, self._linear(rows, fmt, inner, 2, self.of_experts)),
        }

    def _routed_experts(self, fmt: Format) -> dict[str, tuple[abi.Op, Any]]:
        quantised = fmt == Format.FP8_CHANNEL
        x = (self.x_q.struct, self.x_scale.struct) if quantised else (self.x.struct, ABSENT)
        inner = (self.inner_q.struct, self.inner_scale.struct) if quantised else (ABSENT, ABSENT)
        up, down = routed_experts(
            self.experts,
            (self.offsets, self.order),
            (self.ids, self.expert_weights),
            x,
            (self.inner.struct, *inner),
            self.shared.struct,
            self.delta.struct,
        )
        return {"experts_up": up, "experts_down": down}

    def with_calls_of_no_rows(self) -> Self:
        """Before and after each call the same one on nothing: it may not hide its neighbours from each other."""
        between = []
        for op, args in self.calls:
            empty = type(args).from_buffer_copy(args)
            empty.rows = 0
            between += [(op, empty), (op, args), (op, empty)]
        self.calls = between
        return self

    def run(self, device: Device, wait: Callable[[], None]) -> list[Array]:
        self._give_workspace(device)
        for op, args in self.calls * rounds(device):
            assert device.call(op, args) == abi.Status.OK
            wait()
        return self._results(device)

    def replay(self, device: Device) -> list[Array]:
        """What `run` does, by replays of a graph of some rounds."""
        self._give_workspace(device)
        graph = record(device, self.calls * (ROUNDS // REPLAYS))
        for _ in range(REPLAYS):
            assert device.table.kernels.graph_launch(device.handle, graph) == abi.Status.OK
        results = self._results(device)
        device.table.kernels.graph_free(device.handle, graph)
        return results

    def _give_workspace(self, device: Device) -> None:
        sizes = (device.table.kernels.workspace_bytes(device.handle, op, ctypes.byref(args)) for op, args in self.calls)
        self.workspace = Buffer(poison((max(sizes),), np.uint8))
        device.table.kernels.set_workspace(device.handle, self.workspace.pointer, self.workspace.shape[0])

    def _results(self, device: Device) -> list[Array]:
        device.memory.wait()
        listed = self.offsets.read()
        outputs = self.residual, self.delta, self.ids, self.expert_weights, self.hidden, self.hidden_again
        return [
            *(form.read() for form in (*outputs, self.scale_again, self.of_experts, self.inner_of_hidden)),
            *(listed, self.order.read()[: listed[-1]]),
        ]


def rounds(device: Device) -> int:
    """Few where calls end before they return."""
    return 2 if device.table.on_host else ROUNDS


def repetitions(device: Device) -> int:
    return 1 if device.table.on_host else 3


def assert_alike(found: list[Array], expected: list[Array]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_bits_equal(one, other)


@pytest.mark.parametrize("fmt", [Format.FP8_CHANNEL, Format.BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("rows", [1, 16, 64, 130])
@pytest.mark.parametrize("order", ORDERS)
def test_neighbours_do_not_disturb_each_other(device: Device, fmt: Format, rows: int, order: str) -> None:
    one_by_one = Layer(fmt, rows, order).run(device, device.memory.wait)
    for _ in range(repetitions(device)):
        assert_alike(Layer(fmt, rows, order).run(device, lambda: None), one_by_one)


@pytest.mark.parametrize("fmt", [Format.FP8_CHANNEL, Format.BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 130])
@pytest.mark.parametrize("order", GRAPH_ORDERS)
def test_branches_of_a_graph_do_not_disturb_each_other(device: Device, fmt: Format, rows: int, order: str) -> None:
    if not has_graphs(device):
        pytest.skip("records no graphs")
    one_by_one = Layer(fmt, rows, order).run(device, device.memory.wait)
    for _ in range(3):
        assert_alike(Layer(fmt, rows, order).replay(device), one_by_one)


@pytest.mark.parametrize("fmt", [Format.FP8_CHANNEL, Format.BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_a_graph_has_a_branch_for_each_shared_expert(device: Device, fmt: Format, rows: int) -> None:
    if device.table.name != "cuda":
        pytest.skip("of the CUDA table only")
    count = device.table.library.glm_cuda_branches
    count.restype, count.argtypes = ctypes.c_uint64, [ctypes.c_void_p]
    before = count(device.handle)
    Layer(fmt, rows, DECODE_ORDER).replay(device)
    assert count(device.handle) - before == ROUNDS // REPLAYS


@pytest.mark.parametrize("rows", [1, 64])
def test_calls_of_no_rows_are_no_neighbours(device: Device, rows: int) -> None:
    one_by_one = Layer(Format.FP8_CHANNEL, rows).run(device, device.memory.wait)
    for _ in range(repetitions(device)):
        layer = Layer(Format.FP8_CHANNEL, rows).with_calls_of_no_rows()
        assert_alike(layer.run(device, lambda: None), one_by_one)
        if has_graphs(device):
            layer = Layer(Format.FP8_CHANNEL, rows).with_calls_of_no_rows()
            assert_alike(layer.replay(device), one_by_one)
