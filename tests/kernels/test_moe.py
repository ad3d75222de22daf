"""The expert operations against NumPy: packing, gate/up and down; experts elsewhere and untouched ones included."""

import ctypes
from typing import Any

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
    F64Array,
    assert_bits_equal,
    assert_close,
    output,
    poison,
    tensor,
)
from tests.kernels.matrices import (
    FP8_FORMATS,
    Activations,
    BoundExperts,
    Format,
    blocks,
    random_activations,
    random_weights,
)
from tests.kernels.oracle import round_to

Dtype = np.dtype[Any]
FORMATS = list(Format)


def random_ids(rng: np.random.Generator, rows: int, experts: int, top_k: int) -> Array:
    return np.argsort(rng.random((rows, experts)), axis=1)[:, :top_k].astype(np.int32)


class Packed:
    """What moe_group writes, by its definition."""

    def __init__(self, ids: Array, first: int, count: int) -> None:
        self.ids, self.first, self.count = ids, first, count
        flat = ids.reshape(-1) - first
        self.lists = [np.flatnonzero(flat == e).astype(np.int32) for e in range(count)]
        self.offsets = np.cumsum([0, *(len(one) for one in self.lists)]).astype(np.int32)
        self.order = np.concatenate([*self.lists, np.zeros(0, np.int32)]).astype(np.int32)
        self.assignments = [(e, int(a)) for e, one in enumerate(self.lists) for a in one]


# ---- moe_group ----


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17, 64, 65, 257, 3000, 9000])
@pytest.mark.parametrize("stride", [4, 6])
@pytest.mark.parametrize("first,count", [(0, 16), (4, 8), (15, 1), (20, 5)])
def test_group_lists_local_assignments_in_order(
    device: Device, rng: np.random.Generator, rows: int, stride: int, first: int, count: int
) -> None:
    ids = random_ids(rng, rows, 16, 4)
    bound = tensor(ids, stride)
    offsets, order = Buffer(poison((count + 1,), I32)), Buffer(poison((rows * 4,), I32))
    device.run(abi.Op.MOE_GROUP, abi.MoeGroupArgs(rows, bound.struct, 4, first, count, offsets.pointer, order.pointer))
    if rows == 0:
        assert_bits_equal(offsets.read(), poison((count + 1,), I32))
        return
    packed = Packed(ids, first, count)
    assert offsets.read().tolist() == packed.offsets.tolist()
    assert order.read()[: packed.offsets[-1]].tolist() == packed.order.tolist()


@pytest.mark.parametrize("rows", [0, 1, 17, 1100, 2100])
@pytest.mark.parametrize("spare_slot", [-1, 2])
def test_group_adds_up_loads_but_of_spare_rows(
    device: Device, rng: np.random.Generator, rows: int, spare_slot: int
) -> None:
    before = np.arange(8, dtype=np.uint64) + np.uint64(2**33)
    loads = Buffer(before)
    expected = before.copy()
    for _ in range(2):
        ids, slots = random_ids(rng, rows, 16, 4), rng.integers(0, 4, rows).astype(np.int32)
        bound, row_slots = tensor(ids), Buffer(slots)
        offsets, order = Buffer(poison((9,), I32)), Buffer(poison((rows * 4,), I32))
        step = abi.StepInputs(rows, row_slots=row_slots.pointer)
        args = abi.MoeGroupArgs(rows, bound.struct, 4, 4, 8, offsets.pointer, order.pointer)
        args.loads, args.step, args.spare_slot = loads.pointer, ctypes.pointer(step), spare_slot
        device.run(abi.Op.MOE_GROUP, args)
        asked = ids[slots != spare_slot].reshape(-1)
        expected += np.bincount(asked, minlength=16)[4:12].astype(np.uint64)
    assert loads.read().tolist() == expected.tolist()


# ---- moe_gate_up ----


class GateUp:
    def __init__(
        self, rng: np.random.Generator, fmt: Format, hidden: int, inner: int, experts: int, first: int
    ) -> None:
        self.gate = [random_weights(rng, fmt, inner, hidden, gap=2) for _ in range(experts)]
        self.up = [random_weights(rng, fmt, inner, hidden, gap=1) for _ in range(experts)]
        self.first, self.inner = first, inner

    def run(self, device: Device, x: Activations, ids: Array, act: Dtype, groups: int) -> tuple[Array, Array, Array]:
        """out, q, scale; q and scale are left out if groups is 0."""
        rows, top_k = ids.shape
        packed = Packed(ids, self.first, len(self.gate))
        gate, up, bound = BoundExperts(self.gate, self.first), BoundExperts(self.up, self.first), x.bind()
        offsets, order = Buffer(packed.offsets), Buffer(packed.order)
        out = output(rows * top_k, self.inner, act, self.inner + 1)
        q, scale = output(rows * top_k, self.inner, FP8), output(rows * top_k, max(groups, 1), F32)
        args = abi.MoeGateUpArgs(rows, top_k, bound.x.struct, bound.scale_struct, gate.struct, up.struct)
        args.offsets, args.order, args.out = offsets.pointer, order.pointer, out.struct
        args.q, args.scale = (q.struct, scale.struct) if groups else (ABSENT, ABSENT)
        device.run(abi.Op.MOE_GATE_UP, args)
        return out.read(), q.read(), scale.read()

    def expected(self, x: Activations, ids: Array, act: Dtype) -> F64Array:
        """NaN where an assignment is not local."""
        out = np.full((ids.size, self.inner), np.nan)
        for e, a in Packed(ids, self.first, len(self.gate)).assignments:
            row = x.value[a // ids.shape[1]]
            g, u = round_to(self.gate[e].value @ row, act), round_to(self.up[e].value @ row, act)
            out[a] = round_to(round_to(g / (1 + np.exp(-g)), act) * u, act)
        return out


def listed(ids: Array, first: int, count: int) -> Array:
    flat = ids.reshape(-1)
    inside: Array = (flat >= first) & (flat < first + count)
    return inside


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("rows", [0, 1, 3, 17, 65])
def test_gate_up_for_every_format(device: Device, rng: np.random.Generator, act: Dtype, fmt: Format, rows: int) -> None:
    problem = GateUp(rng, fmt, 170, 50, experts=5, first=2)
    x = random_activations(rng, fmt, rows, 170, act)
    ids = random_ids(rng, rows, 8, 3)
    out, _, _ = problem.run(device, x, ids, act, 0)
    local = listed(ids, 2, 5)
    assert_close(out[local], problem.expected(x, ids, act)[local], 2**-6 if act == BF16 else 1e-5)
    assert_bits_equal(out[~local], poison(out[~local].shape, act))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_gate_up_quantises_what_it_would_have_stored(
    device: Device, rng: np.random.Generator, act: Dtype, rows: int, groups: int
) -> None:
    fmt = Format.FP8_CHANNEL if groups == 1 else Format.FP8_BLOCK
    problem = GateUp(rng, fmt, 128, 192, experts=4, first=0)
    x, ids = random_activations(rng, fmt, rows, 128, act), random_ids(rng, rows, 6, 2)
    out, q, scale = problem.run(device, x, ids, act, groups)
    local = listed(ids, 0, 4)
    again_q, again_scale = output(rows * 2, 192, FP8), output(rows * 2, groups, F32)
    args = abi.QuantizeArgs(rows * 2, tensor(out).struct, again_q.struct, again_scale.struct)
    kept = tensor(out)
    args.x = kept.struct
    device.run(abi.Op.QUANTIZE, args)
    assert_bits_equal(q[local], again_q.read()[local])
    assert_bits_equal(scale[local], again_scale.read()[local])
    assert_bits_equal(q[~local], poison(q[~local].shape, FP8))


# ---- moe_down ----


class Down:
    def __init__(
        self, rng: np.random.Generator, fmt: Format, inner: int, hidden: int, experts: int, first: int
    ) -> None:
        self.down = [random_weights(rng, fmt, hidden, inner, gap=1) for _ in range(experts)]
        self.first, self.hidden = first, hidden

    def run(
        self, device: Device, x: Activations, ids: Array, weights: Array, base: Array | None, act: Dtype, in_place: bool
    ) -> Array:
        rows, top_k = ids.shape
        packed = Packed(ids, self.first, len(self.down))
        down, bound = BoundExperts(self.down, self.first), x.bind()
        offsets, order = Buffer(packed.offsets), Buffer(packed.order)
        bound_ids, bound_weights = tensor(ids), tensor(weights)
        bound_base = None if base is None else tensor(base, self.hidden + 2)
        out = bound_base if in_place and bound_base else output(rows, self.hidden, act, self.hidden + 2)
        args = abi.MoeDownArgs(rows, top_k, bound.x.struct, bound.scale_struct, down.struct)
        args.offsets, args.order = offsets.pointer, order.pointer
        args.ids, args.weights = bound_ids.struct, bound_weights.struct
        args.base, args.out = ABSENT if bound_base is None else bound_base.struct, out.struct
        device.run(abi.Op.MOE_DOWN, args)
        return out.read()

    def expected(self, x: Activations, ids: Array, weights: Array, base: Array | None, act: Dtype) -> F64Array:
        out = np.zeros((ids.shape[0], self.hidden)) if base is None else base.astype(np.float64)
        for e, a in Packed(ids, self.first, len(self.down)).assignments:
            t, j = divmod(a, ids.shape[1])
            out[t] += float(weights[t, j]) * round_to(self.down[e].value @ x.value[a], act)
        return round_to(out, act)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 65])
@pytest.mark.parametrize("base", ["none", "beside", "in place"])
def test_down_adds_weighted_experts(
    device: Device, rng: np.random.Generator, act: Dtype, fmt: Format, rows: int, base: str
) -> None:
    problem = Down(rng, fmt, 70, 150, experts=5, first=1)
    x = random_activations(rng, fmt, rows * 3, 70, act)
    ids, weights = random_ids(rng, rows, 8, 3), rng.random((rows, 3)).astype(np.float32)
    start = None if base == "none" else rng.standard_normal((rows, 150)).astype(act)
    got = problem.run(device, x, ids, weights, start, act, base == "in place")
    assert_close(got, problem.expected(x, ids, weights, start, act), 2**-6 if act == BF16 else 1e-5)


def test_unlisted_assignments_are_never_read(device: Device, rng: np.random.Generator) -> None:
    problem = Down(rng, Format.BF16, 40, 60, experts=2, first=3)
    x, ids = random_activations(rng, Format.BF16, 18, 40, F32), random_ids(rng, 6, 8, 3)
    weights = rng.random((6, 3)).astype(np.float32)
    clean = problem.run(device, x, ids, weights, None, F32, False)
    x.data[~listed(ids, 3, 2)] = np.nan
    weights.reshape(-1)[~listed(ids, 3, 2)] = np.nan
    assert_bits_equal(problem.run(device, x, ids, weights, None, F32, False), clean)


def test_weights_of_untouched_experts_are_never_read(device: Device, rng: np.random.Generator) -> None:
    up, down = GateUp(rng, Format.FP8_CHANNEL, 64, 64, 4, 0), Down(rng, Format.FP8_CHANNEL, 64, 64, 4, 0)
    ids = np.array([[0, 2], [2, 0]], np.int32)
    x = random_activations(rng, Format.FP8_CHANNEL, 2, 64, F32)
    inner = random_activations(rng, Format.FP8_CHANNEL, 4, 64, F32)
    weights = np.ones((2, 2), np.float32)
    first = up.run(device, x, ids, F32, 0)[0], down.run(device, inner, ids, weights, None, F32, False)
    for one in (*up.gate, *up.up, *down.down):
        assert one.scale is not None
    for expert in (1, 3):
        for weight in (up.gate[expert], up.up[expert], down.down[expert]):
            weight.scale = np.full(64, np.nan, np.float32)
    second = up.run(device, x, ids, F32, 0)[0], down.run(device, inner, ids, weights, None, F32, False)
    for before, after in zip(first, second, strict=True):
        assert_bits_equal(after, before)


@pytest.mark.parametrize("fmt", [Format.BF16, *FP8_FORMATS], ids=lambda fmt: fmt.name.lower())
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    device: Device, other_device: Device, rng: np.random.Generator, fmt: Format
) -> None:
    top_k, groups = 3, 1 if fmt != Format.FP8_BLOCK else blocks(150)
    up, down = GateUp(rng, fmt, 170, 150, 6, 0), Down(rng, fmt, 150, 90, 6, 0)
    x, ids = random_activations(rng, fmt, 70, 170, BF16), random_ids(rng, 70, 6, top_k)
    inner = random_activations(rng, fmt, 70 * top_k, 150, BF16)
    weights, base = rng.random((70, top_k)).astype(np.float32), rng.standard_normal((70, 90)).astype(BF16)
    whole = up.run(device, x, ids, BF16, groups)
    whole_down = down.run(device, inner, ids, weights, base, BF16, False)
    for begin, end in [(0, 1), (69, 70), (3, 7), (10, 27), (5, 70)]:
        rows, spread = slice(begin, end), slice(begin * top_k, end * top_k)
        part = up.run(other_device, x.rows(rows), ids[rows], BF16, groups)
        for got, want in zip(part, whole, strict=True):
            assert_bits_equal(got, want[spread])
        got_down = down.run(other_device, inner.rows(spread), ids[rows], weights[rows], base[rows], BF16, False)
        assert_bits_equal(got_down, whole_down[rows])


def test_all_rows_on_one_expert_and_most_experts_idle(device: Device, rng: np.random.Generator) -> None:
    up = GateUp(rng, Format.FP8_CHANNEL, 96, 70, experts=160, first=0)
    ids = np.full((300, 1), 77, np.int32)
    x = random_activations(rng, Format.FP8_CHANNEL, 300, 96, F32)
    assert_close(up.run(device, x, ids, F32, 0)[0], up.expected(x, ids, F32), 1e-5)
