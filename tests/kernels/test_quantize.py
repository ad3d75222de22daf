"""quantize: dynamic FP8 by row and by group, bit for bit; edges of the scale."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.harness import BF16, F32, FP8, Array, Device, assert_bits_equal, output, tensor
from tests.kernels.matrices import blocks

Dtype = np.dtype[Any]


def run(device: Device, x: Array, groups: int) -> tuple[Array, Array]:
    rows, cols = x.shape
    bound = tensor(x, cols + 3)
    q, scale = output(rows, cols, FP8, cols + 9), output(rows, groups, F32, groups + 1)
    device.run(abi.Op.QUANTIZE, abi.QuantizeArgs(rows, bound.struct, q.struct, scale.struct))
    return q.read(), scale.read()


def expected(x: Array, groups: int) -> tuple[Array, Array]:
    """In f32, step by step as the contract says; ml_dtypes rounds, after the saturation that it lacks."""
    rows, cols = x.shape
    size = cols if groups == 1 else abi.FP8_BLOCK
    q, scale = np.zeros((rows, cols), FP8), np.ones((rows, groups), np.float32)
    for g in range(groups):
        part = x[:, g * size : (g + 1) * size].astype(np.float32)
        top = np.abs(part).max(axis=1)
        scale[:, g] = np.where(top == 0, np.float32(1), top / np.float32(448))
        scaled = np.clip(part / scale[:, g : g + 1], -448, 448)
        q[:, g * size : (g + 1) * size] = scaled.astype(ml_dtypes.float8_e4m3fn)
    return q, scale


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 17, 64, 65])
@pytest.mark.parametrize("cols", [1, 7, 128, 129, 170, 576, 684, 12288])
def test_by_row_and_by_group(device: Device, rng: np.random.Generator, act: Dtype, rows: int, cols: int) -> None:
    x = (rng.standard_normal((rows, cols)) * np.exp(rng.uniform(-9, 9, (rows, 1)))).astype(act)
    for groups in {1, blocks(cols)}:
        for actual, wanted in zip(run(device, x, groups), expected(x, groups), strict=True):
            assert_bits_equal(actual, wanted)


def test_a_group_of_zeros_has_scale_one_and_keeps_signs(device: Device) -> None:
    x = np.zeros((2, 256), np.float32)
    x[0, 130], x[1, :] = 3.0, -0.0
    q, scale = run(device, x, 2)
    assert scale.tolist() == [[1.0, np.float32(3.0) / np.float32(448)], [1.0, 1.0]]
    assert q[0, 130] == 448
    assert (q[1].view(np.uint8) == 0x80).all()


def test_values_so_small_that_the_scale_would_be_zero(device: Device) -> None:
    x = np.array([[1e-45, 0.0, -1e-45]], np.float32)
    q, scale = run(device, x, 1)
    assert scale.tolist() == [[1.0]]
    assert q.view(np.uint8).tolist() == [[0, 0, 0x80]]


def test_nan_and_infinity_are_not_hidden(device: Device) -> None:
    x = np.array([[1.0, np.nan, 2.0], [1.0, -np.inf, 2.0]], np.float32)
    q, scale = run(device, x, 1)
    assert np.isnan(scale[0, 0]) and np.isnan(q[0].astype(np.float32)).all()
    assert np.isinf(scale[1, 0]) and np.isnan(q[1, 1].astype(np.float32))


def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    device: Device, other_device: Device, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((70, 300)).astype(BF16)
    for groups in (1, 3):
        whole_q, whole_scale = run(device, x, groups)
        for rows in (1, 2, 31, 69):
            q, scale = run(other_device, x[70 - rows :], groups)
            assert_bits_equal(q, whole_q[70 - rows :])
            assert_bits_equal(scale, whole_scale[70 - rows :])
