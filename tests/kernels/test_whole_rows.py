"""Rows of bf16 in whole, aligned packs may take faster paths, of the same bits as rows that lie anywhere."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.cases_rows import QkCase
from tests.kernels.harness import ABSENT, BF16, F32, FP8, Array, Buffer, Device, assert_bits_equal, output, tensor
from tests.kernels.test_qk_norm_rope_store import make
from tests.kernels.test_qk_norm_rope_store import run as run_qk

ROWS = [0, 1, 3, 140, 300]
COLS = [8, 64, 192, 576, 1536, 5120, 8192, 8200]
Results = dict[str, Array]
Run = Callable[[Device, Array, Array, Array, bool, int], Results]


def noisy(rng: np.random.Generator, rows: int, cols: int) -> Array:
    """Rows of all magnitudes; some of zeros, some with infinite values or NaN."""
    x = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-60, 60, (rows, 1)))
    x[rng.random(x.shape) < 0.02] = -0.0
    x[2::17] = 0.0
    x[5::31, cols // 2] = np.inf
    x[7::31, cols - 1] = np.nan
    x[9::31] *= 2.0**-70
    x[11::31] = rng.integers(-448, 449, x[11::31].shape)
    converted: Array = x.astype(F32).astype(BF16)
    return converted


def targets(rows: int, cols: int, out: bool, gap: int) -> tuple[Any, Any, Any]:
    y = output(rows, cols, BF16, cols + gap) if out else None
    return y, output(rows, cols, FP8, cols + gap), output(rows, 1, F32)


def read(**arrays: Any) -> Results:
    return {name: bound.read() for name, bound in arrays.items() if bound is not None}


def norm(device: Device, x: Array, delta: Array, weight: Array, out: bool, gap: int) -> Results:
    rows, cols = x.shape
    residual, added, w = tensor(x, cols + gap), tensor(delta, cols + gap), Buffer(weight)
    y, q, scale = targets(rows, cols, out, gap)
    structs = [ABSENT if y is None else y.struct, q.struct, scale.struct]
    device.run(abi.Op.RMS_NORM, abi.RmsNormArgs(rows, residual.struct, added.struct, w.pointer, 1e-5, *structs))
    return read(residual=residual, out=y, q=q, scale=scale)


def plain_norm(device: Device, x: Array, delta: Array, weight: Array, out: bool, gap: int) -> Results:
    rows, cols = x.shape
    residual, w, y = tensor(x, cols + gap), Buffer(weight), output(rows, cols, BF16, cols + gap)
    args = abi.RmsNormArgs(rows, residual.struct, ABSENT, w.pointer, 1e-5, y.struct, ABSENT, ABSENT)
    device.run(abi.Op.RMS_NORM, args)
    return read(residual=residual, out=y)


def quantize(device: Device, x: Array, delta: Array, weight: Array, out: bool, gap: int) -> Results:
    rows, cols = x.shape
    bound = tensor(x, cols + gap)
    _, q, scale = targets(rows, cols, False, gap)
    device.run(abi.Op.QUANTIZE, abi.QuantizeArgs(rows, bound.struct, q.struct, scale.struct))
    return read(q=q, scale=scale)


def silu_mul(device: Device, x: Array, delta: Array, weight: Array, out: bool, gap: int) -> Results:
    rows, cols = x.shape
    bound = tensor(np.concatenate([x, delta], axis=1), 2 * cols + gap)
    y, q, scale = targets(rows, cols, out, gap)
    structs = [ABSENT if y is None else y.struct, q.struct, scale.struct]
    device.run(abi.Op.SILU_MUL, abi.SiluMulArgs(rows, bound.struct, *structs))
    return read(out=y, q=q, scale=scale)


@pytest.mark.parametrize("run", [norm, plain_norm, quantize, silu_mul], ids=lambda run: run.__name__)
@pytest.mark.parametrize("out", [False, True], ids=["q", "out_q"])
@pytest.mark.parametrize("cols", COLS)
def test_layouts_and_crowds(device: Device, rng: np.random.Generator, run: Run, out: bool, cols: int) -> None:
    x, delta = noisy(rng, 300, cols), noisy(rng, 300, cols)
    weight = rng.standard_normal(cols).astype(F32)
    anywhere = run(device, x, delta, weight, out, 3)
    for rows in ROWS:
        whole = run(device, x[300 - rows :], delta[300 - rows :], weight, out, 0)
        for name, expected in anywhere.items():
            assert_bits_equal(whole[name], expected[300 - rows :])


@pytest.mark.parametrize("kv_dtype", [BF16, F32, FP8], ids=str)
@pytest.mark.parametrize("heads,kv_heads,normed", [(12, 1, True), (9, 3, True), (12, 1, False), (1, 1, True)])
def test_heads_of_rows_that_start_anywhere(
    device: Device, rng: np.random.Generator, heads: int, kv_heads: int, normed: bool, kv_dtype: "np.dtype[Any]"
) -> None:
    inputs = make(QkCase(heads, kv_heads, 128, 64, normed, ((14, 50), (0, 1), (31, 20))), rng, BF16)
    anywhere = run_qk(device, inputs, kv_dtype, (3, 3))
    for gaps in ((2, 4), (0, 0)):
        result = run_qk(device, inputs, kv_dtype, gaps)
        for name in ("q", "k", "v"):
            assert_bits_equal(getattr(result, name), getattr(anywhere, name))
