from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.kernels import abi, oracle
from tests.kernels.cases_rows import ROW_CASES, RowsCase
from tests.kernels.harness import ABSENT, BF16, Array, Buffer, Device, assert_bits_equal, assert_close, output, tensor
from tests.kernels.quantized import assert_quantized, outputs

EPS = 1e-5


@dataclass
class Result:
    residual: Array
    out: Array | None
    q: Array | None
    scale: Array | None


def run(
    device: Device,
    residual: Array,
    delta: Array | None,
    weight: Array,
    *,
    out: bool = True,
    grouped: bool | None = None,
) -> Result:
    """grouped: None for no FP8 output, else whether it has a scale per 128 columns."""
    rows, cols = residual.shape
    x, w = tensor(residual, cols + 4), Buffer(weight.astype(np.float32))
    d = None if delta is None else tensor(delta, cols + 2)
    y = output(rows, cols, residual.dtype, cols + 6) if out else None
    q, scale = (None, None) if grouped is None else outputs(rows, cols, grouped)
    structs = [ABSENT if t is None else t.struct for t in (d, y, q, scale)]
    args = abi.RmsNormArgs(rows, x.struct, structs[0], w.pointer, EPS, *structs[1:])
    device.run(abi.Op.RMS_NORM, args)
    return Result(x.read(), *(None if t is None else t.read() for t in (y, q, scale)))


def inputs(rng: np.random.Generator, case: RowsCase, act: "np.dtype[Any]") -> tuple[Array, Array, Array]:
    shape = (case.rows, case.cols)
    residual, delta = rng.standard_normal(shape).astype(act), (3 * rng.standard_normal(shape)).astype(act)
    return residual, delta, rng.standard_normal(case.cols).astype(np.float32)


@pytest.mark.parametrize("with_delta", [False, True], ids=["plain", "delta"])
@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_matches_float64(
    device: Device, rng: np.random.Generator, case: RowsCase, act: "np.dtype[Any]", with_delta: bool
) -> None:
    residual, delta, weight = inputs(rng, case, act)
    added = oracle.add_residual(residual, delta if with_delta else None)
    result = run(device, residual, delta if with_delta else None, weight)
    assert_bits_equal(result.residual, added)
    assert result.out is not None
    expected = oracle.normalize(added.astype(np.float64), weight.astype(np.float64), EPS, act)
    assert_close(result.out, expected, 2**-6 if act == BF16 else 2e-6)


@pytest.mark.parametrize("grouped", [False, True], ids=["per_row", "per_128"])
@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_fused_fp8_is_the_quantised_output(
    device: Device, rng: np.random.Generator, case: RowsCase, act: "np.dtype[Any]", grouped: bool
) -> None:
    residual, delta, weight = inputs(rng, case, act)
    both = run(device, residual, delta, weight, grouped=grouped)
    assert both.out is not None
    assert both.q is not None
    assert both.scale is not None
    assert_quantized(both.q, both.scale, both.out)
    alone = run(device, residual, delta, weight, out=False, grouped=grouped)
    assert alone.q is not None
    assert alone.scale is not None
    assert_bits_equal(alone.q, both.q)
    assert_bits_equal(alone.scale, both.scale)


def test_a_row_has_the_same_bits_alone_and_in_a_crowd(
    device: Device, other_device: Device, rng: np.random.Generator
) -> None:
    residual, delta, weight = inputs(rng, RowsCase(70, 576), BF16)
    crowd = run(device, residual, delta, weight, grouped=True)
    elsewhere = run(other_device, residual[::-1], delta[::-1], weight, grouped=True)
    for row in range(70):
        alone = run(device, residual[row : row + 1], delta[row : row + 1], weight, grouped=True)
        for name in ("residual", "out", "q", "scale"):
            assert_bits_equal(getattr(alone, name)[0], getattr(crowd, name)[row])
            assert_bits_equal(getattr(elsewhere, name)[69 - row], getattr(crowd, name)[row])


def test_zero_rows_stay_zero(device: Device) -> None:
    result = run(device, np.zeros((2, 64), BF16), None, np.ones(64), grouped=False)
    assert result.out is not None
    assert result.scale is not None
    assert not result.out.any()
    assert (result.scale == 1).all()
