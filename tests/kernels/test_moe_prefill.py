"""Expert layers of as many tokens as prefill has: a token's bits are those of a small batch."""

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.expert_calls import routed_experts
from tests.kernels.harness import (
    ABSENT,
    BF16,
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
from tests.kernels.test_moe import listed, random_ids

EXPERTS, FIRST, LOCAL, TOP_K = 24, 5, 7, 4


class Layer:
    """Grouping, gate and up, and down; rows are aligned as the wide tiles need, those of weights but for `gap`."""

    def __init__(self, rng: np.random.Generator, rows: int, hidden: int, inner: int, gap: int = 0) -> None:
        fmt = Format.FP8_CHANNEL
        self.hidden, self.inner = hidden, inner
        self.experts = [
            BoundExperts([random_weights(rng, fmt, n, k, gap) for _ in range(LOCAL)], FIRST)
            for n, k in ((inner, hidden), (inner, hidden), (hidden, inner))
        ]
        self.x = random_activations(rng, fmt, rows, hidden, BF16)
        self.mixed = rng.random((rows, TOP_K)).astype(np.float32)
        self.base = rng.standard_normal((rows, hidden)).astype(BF16)
        self.ids = random_ids(rng, rows, EXPERTS, TOP_K)

    def crowd(self, expert: int) -> None:
        """Every token's first choice is this expert."""
        other = self.ids == expert
        self.ids[other] = np.broadcast_to(self.ids[:, :1], self.ids.shape)[other]
        self.ids[:, 0] = expert

    def run(self, device: Device, part: slice, base: str) -> tuple[Array, Array, Array]:
        """Quantised activations, their scales and the layer's output."""
        assert self.x.scale is not None
        x, x_scale = tensor(self.x.data[part]), tensor(self.x.scale[part])
        ids, mixed = tensor(self.ids[part]), tensor(self.mixed[part])
        rows = len(self.ids[part])
        offsets, order = Buffer(poison((LOCAL + 1,), I32)), Buffer(poison((rows * TOP_K,), I32))
        q, scale = output(rows * TOP_K, self.inner, FP8), output(rows * TOP_K, 1, np.float32)
        start = tensor(self.base[part])
        out = start if base == "in place" else output(rows, self.hidden, BF16)
        inner = (abi.Tensor(None, abi.Dtype.BF16, self.inner, self.inner), q.struct, scale.struct)
        device.run(
            abi.Op.MOE_GROUP, abi.MoeGroupArgs(rows, ids.struct, TOP_K, FIRST, LOCAL, offsets.pointer, order.pointer)
        )
        for op, args in routed_experts(
            self.experts,
            (offsets, order),
            (ids, mixed),
            (x.struct, x_scale.struct),
            inner,
            ABSENT if base == "none" else start.struct,
            out.struct,
        ):
            device.run(op, args)
        return q.read(), scale.read(), out.read()

    def check_parts(self, device: Device, parts: list[tuple[int, int]], base: str) -> None:
        """Rows [begin, end) by themselves have the bits that they have among all."""
        q, scale, out = self.run(device, slice(0, len(self.ids)), base)
        for begin, end in parts:
            part, spread = slice(begin, end), slice(begin * TOP_K, end * TOP_K)
            local = listed(self.ids[part], FIRST, LOCAL)
            got_q, got_scale, got_out = self.run(device, part, base)
            assert_bits_equal(got_q[local], q[spread][local])
            assert_bits_equal(got_scale[local], scale[spread][local])
            assert_bits_equal(got_out, out[part])


@pytest.mark.parametrize("base", ["none", "beside", "in place"])
@pytest.mark.parametrize(
    "rows,hidden,inner,crowded", [(1030, 640, 272, False), (1500, 1040, 512, False), (2600, 512, 208, True)]
)
def test_a_token_of_many_has_the_bits_of_a_small_batch(
    device: Device, rng: np.random.Generator, rows: int, hidden: int, inner: int, crowded: bool, base: str
) -> None:
    layer = Layer(rng, rows, hidden, inner)
    if crowded:
        layer.crowd(FIRST + 3)
    layer.check_parts(device, [(0, 1), (3, 67), (500, 720), (rows - 90, rows)], base)


def test_weights_that_tensor_copies_cannot_read(device: Device, rng: np.random.Generator) -> None:
    Layer(rng, 1100, 640, 272, gap=3).check_parts(device, [(0, 1), (1000, 1100)], "in place")
