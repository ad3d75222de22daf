from typing import Any

import numpy as np
import pytest

from tests.kernels import abi, oracle
from tests.kernels.cases_rows import ROW_CASES, RowsCase
from tests.kernels.harness import ABSENT, BF16, F32, Array, Device, assert_bits_equal, assert_close, output, tensor
from tests.kernels.quantized import assert_quantized, outputs


def run(
    device: Device, x: Array, *, out: bool = True, grouped: bool | None = None
) -> tuple[Array | None, Array | None, Array | None]:
    """out, q and scale, each None where it was not asked for."""
    rows, n = x.shape[0], x.shape[1] // 2
    bound = tensor(x, 2 * n + 4)
    y = output(rows, n, x.dtype, n + 6) if out else None
    q, scale = (None, None) if grouped is None else outputs(rows, n, grouped)
    structs = [ABSENT if t is None else t.struct for t in (y, q, scale)]
    device.run(abi.Op.SILU_MUL, abi.SiluMulArgs(rows, bound.struct, *structs))
    y_read, q_read, scale_read = (None if t is None else t.read() for t in (y, q, scale))
    return y_read, q_read, scale_read


@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_matches_float64(device: Device, rng: np.random.Generator, case: RowsCase, act: "np.dtype[Any]") -> None:
    x = (4 * rng.standard_normal((case.rows, 2 * case.cols))).astype(act)
    y, _, _ = run(device, x)
    assert y is not None
    assert_close(y, oracle.silu_mul(x), 2**-6 if act == BF16 else 2e-6)


@pytest.mark.parametrize("grouped", [False, True], ids=["per_row", "per_128"])
@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_fused_fp8_is_the_quantised_output(
    device: Device, rng: np.random.Generator, case: RowsCase, act: "np.dtype[Any]", grouped: bool
) -> None:
    x = (4 * rng.standard_normal((case.rows, 2 * case.cols))).astype(act)
    y, q, scale = run(device, x, grouped=grouped)
    assert y is not None
    assert q is not None
    assert scale is not None
    assert_quantized(q, scale, y)
    _, q_alone, scale_alone = run(device, x, out=False, grouped=grouped)
    assert q_alone is not None
    assert scale_alone is not None
    assert_bits_equal(q_alone, q)
    assert_bits_equal(scale_alone, scale)


def test_large_gates_saturate_without_overflow(device: Device) -> None:
    gate = np.array([[-1e30, -1e4, -90, -88, -20, 0, 20, 88, 90, 1e4, 1e30]], np.float32)
    y, _, _ = run(device, np.concatenate([gate, np.ones_like(gate)], axis=1))
    assert y is not None
    np.testing.assert_allclose(y[0, 5:], gate[0, 5:], rtol=1e-6)
    assert np.isfinite(y).all()
    assert (np.abs(y[0, :4]) < 1e-5).all()


def test_a_row_has_the_same_bits_alone_and_in_a_crowd(
    device: Device, other_device: Device, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((70, 2 * 200)).astype(F32)
    crowd, elsewhere = run(device, x)[0], run(other_device, x[::-1])[0]
    assert crowd is not None
    assert elsewhere is not None
    assert_bits_equal(elsewhere[::-1].copy(), crowd)
    for row in range(70):
        alone = run(device, x[row : row + 1])[0]
        assert alone is not None
        assert_bits_equal(alone[0], crowd[row])
