"""linear against float64, for every format, shape edge and batch size; and that a row's bits are its own."""

from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.harness import BF16, F32, Array, Buffer, Device, F64Array, assert_bits_equal, assert_close, output
from tests.kernels.matrices import FP8_FORMATS, Activations, Format, Weights, random_activations, random_weights

Dtype = np.dtype[Any]
FORMATS = list(Format)


def run(
    device: Device, x: Activations, parts: list[Weights], out_dtype: Dtype, biases: list[Array | None] | None = None
) -> Array:
    rows = x.data.shape[0]
    bound_x, bound = x.bind(), [part.bind() for part in parts]
    bias_buffers = [None if bias is None else Buffer(bias) for bias in biases or [None] * len(parts)]
    cols = sum(part.data.shape[0] for part in parts)
    out = output(rows, cols, out_dtype, cols + 3)
    args = abi.LinearArgs(rows, len(parts), parts[0].format, bound_x.x.struct, bound_x.scale_struct)
    for i, (part, bias) in enumerate(zip(bound, bias_buffers, strict=True)):
        args.parts[i] = part.struct
        args.bias[i] = None if bias is None else bias.pointer
    args.out = out.struct
    device.run(abi.Op.LINEAR, args)
    return out.read()


def expected(x: Activations, parts: list[Weights], biases: list[Array | None] | None = None) -> F64Array:
    added = [0.0 if bias is None else bias.astype(np.float64) for bias in biases or [None] * len(parts)]
    return np.concatenate([x.value @ part.value.T + bias for part, bias in zip(parts, added, strict=True)], axis=1)


def tolerance(out_dtype: Dtype) -> float:
    return 2**-8 if out_dtype == BF16 else 2e-6


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 17, 64, 65, 130])
def test_every_format_and_batch_size(
    device: Device, rng: np.random.Generator, act: Dtype, fmt: Format, rows: int
) -> None:
    x = random_activations(rng, fmt, rows, 192, act)
    parts = [random_weights(rng, fmt, 75, 192)]
    assert_close(run(device, x, parts, act), expected(x, parts), tolerance(act))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize(
    "n,k",
    [
        (1, 1),
        (1, 7),
        (2, 33),
        (23, 170),
        (24, 684),
        (25, 342),
        (128, 128),
        (129, 257),
        (300, 576),
        (65, 1152),
        (9, 5472),
    ],
)
def test_shapes_that_no_tile_divides(device: Device, rng: np.random.Generator, fmt: Format, n: int, k: int) -> None:
    for rows in (1, 3, 6, 11):
        x = random_activations(rng, fmt, rows, k, F32)
        parts = [random_weights(rng, fmt, n, k, gap=rows)]
        assert_close(run(device, x, parts, F32), expected(x, parts), 1e-5)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("rows", [1, 9])
def test_parts_lie_one_after_another_each_with_its_bias(
    device: Device, rng: np.random.Generator, act: Dtype, fmt: Format, rows: int
) -> None:
    x = random_activations(rng, fmt, rows, 160, act)
    sizes = [130, 7, 1, 64]
    parts = [random_weights(rng, fmt, n, 160, gap=3) for n in sizes]
    biases: list[Array | None] = [rng.standard_normal(n).astype(np.float32) for n in sizes]
    biases[2] = None
    assert_close(run(device, x, parts, F32, biases), expected(x, parts, biases), 1e-5)
    assert_close(run(device, x, parts, act, biases), expected(x, parts, biases), tolerance(act) + 1e-5)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("n,k", [(50, 576), (27, 170), (130, 1300)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    device: Device, other_device: Device, rng: np.random.Generator, fmt: Format, n: int, k: int
) -> None:
    x = random_activations(rng, fmt, 70, k, BF16)
    parts = [random_weights(rng, fmt, n, k)]
    alone = np.concatenate([run(device, x.rows([i]), parts, F32) for i in range(70)])
    for rows in range(1, 71):
        last = x.rows(slice(70 - rows, 70))
        assert_bits_equal(run(device if rows % 2 else other_device, last, parts, F32), alone[70 - rows :])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("n,k", [(75, 5120), (384, 4256), (1792, 2560)])
def test_a_row_keeps_its_bits_where_blocks_share_its_columns(
    device: Device, rng: np.random.Generator, fmt: Format, n: int, k: int
) -> None:
    x = random_activations(rng, fmt, 64, k, BF16)
    parts = [random_weights(rng, fmt, n, k)]
    checked = [0, 3, 7, 8, 15, 16, 31, 32, 63]
    alone = {i: run(device, x.rows([i]), parts, BF16) for i in checked}
    for rows in (2, 5, 8, 9, 16, 17, 32, 33, 64):
        found = run(device, x.rows(slice(0, rows)), parts, BF16)
        for i in checked:
            if i < rows:
                assert_bits_equal(found[i : i + 1], alone[i])
    assert_close(found, expected(x, parts), tolerance(BF16))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
def test_bits_hold_past_a_panel_of_rows(device: Device, rng: np.random.Generator, fmt: Format) -> None:
    x = random_activations(rng, fmt, 300, 160, BF16)
    parts = [random_weights(rng, fmt, 31, 160)]
    whole = run(device, x, parts, F32)
    for row in (0, 127, 128, 255, 256, 299):
        assert_bits_equal(run(device, x.rows([row]), parts, F32), whole[row : row + 1])


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 11])
def test_every_fp8_weight_code_counts_exactly(device: Device, rng: np.random.Generator, fmt: Format, rows: int) -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    weights = random_weights(rng, fmt, codes.size, 40)
    weights.data = np.zeros_like(weights.data)
    weights.data[:, 37] = codes.view(weights.data.dtype)
    assert weights.scale is not None
    weights.scale[:] = 1.0
    x = random_activations(rng, fmt, rows, 40, F32)
    assert x.scale is not None
    x.data[:, 37] = 1.0
    x.scale[:] = 1.0
    np.testing.assert_array_equal(run(device, x, [weights], F32).astype(np.float64), expected(x, [weights]))


def test_nan_and_infinity_in_x_reach_their_own_row_only(device: Device, rng: np.random.Generator) -> None:
    for rows in (3, 8):
        x = random_activations(rng, Format.BF16, rows, 33, F32)
        clean = run(device, x, [weights := random_weights(rng, Format.BF16, 20, 33)], F32)
        x.data[1, 32] = np.nan
        spoiled = run(device, x, [weights], F32)
        assert np.isnan(spoiled[1]).all()
        assert_bits_equal(np.delete(spoiled, 1, 0), np.delete(clean, 1, 0))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name.lower())
@pytest.mark.parametrize("rows", [330, 700])
def test_parts_of_many_rows_keep_the_bits_of_few(
    device: Device, rng: np.random.Generator, fmt: Format, rows: int
) -> None:
    x = random_activations(rng, fmt, rows, 1024, BF16)
    sizes = [1544, 120, 128]
    parts = [random_weights(rng, fmt, n, 1024) for n in sizes]
    biases: list[Array | None] = [rng.standard_normal(n).astype(np.float32) for n in sizes]
    whole = run(device, x, parts, BF16, biases)
    assert_close(whole, expected(x, parts, biases), tolerance(BF16) + 1e-5)
    for begin, end in [(0, 1), (5, 60), (300, rows)]:
        assert_bits_equal(run(device, x.rows(slice(begin, end)), parts, BF16, biases), whole[begin:end])
