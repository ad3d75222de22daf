"""The FP8 codec of every instruction set, against ml_dtypes and an independent float64 oracle."""

import ctypes
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.harness import load_table
from tests.kernels.isa import ISAS, restore_widest, set_isa

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


def exact_value(code: int) -> float:
    """E4M3 by its definition: sign, exponent with bias 7, three mantissa bits, 0x7f NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float(sign * (8 + mantissa) * 2.0 ** (exponent - 10))


CODES = np.arange(256, dtype=np.uint8)
VALUES = np.array([exact_value(code) for code in range(256)])
MAGNITUDES = VALUES[:127]


def nearest_code(x: npt.NDArray[np.float64]) -> U8:
    """Nearest even in float64, saturating; found by search among the 127 magnitudes, not by bit arithmetic."""
    magnitude = np.minimum(np.abs(x), 448.0)
    above = np.clip(np.searchsorted(MAGNITUDES, magnitude, side="left"), 1, 126)
    below = above - 1
    up, down = MAGNITUDES[above] - magnitude, magnitude - MAGNITUDES[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = np.where(np.isnan(x), 0x7F, code)
    signed: U8 = (code | np.signbit(x) * 0x80).astype(np.uint8)
    return signed


class Codec:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def _run(self, name: str, data: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        function = getattr(self.library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        function.restype = None
        function(data.ctypes.data, out.ctypes.data, data.size)

    def encode(self, x: F32) -> U8:
        out = np.full(x.size, 0xA5, np.uint8)
        self._run("glm_cpu_fp8_encode", x, out)
        return out

    def decode(self, codes: U8) -> F32:
        out = np.full(codes.size, np.nan, np.float32)
        self._run("glm_cpu_fp8_decode", codes, out)
        return out


@pytest.fixture(scope="module", params=ISAS)
def codec(request: pytest.FixtureRequest) -> Iterator[Codec]:
    library = load_table("cpu").library
    if not set_isa(library, request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield Codec(library)
    restore_widest(library)


def bits(x: F32) -> npt.NDArray[np.uint32]:
    return x.view(np.uint32)


def test_decode_gives_the_value_of_every_code(codec: Codec) -> None:
    decoded = codec.decode(CODES)
    np.testing.assert_array_equal(decoded.astype(np.float64), VALUES)
    assert np.signbit(decoded).tolist() == [code >= 128 for code in range(256)]
    np.testing.assert_array_equal(decoded, CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_every_code_survives_decode_and_encode(codec: Codec) -> None:
    assert codec.encode(codec.decode(CODES)).tolist() == CODES.tolist()


def test_encode_at_every_tie_and_its_neighbours(codec: Codec) -> None:
    ties = ((MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2).astype(np.float32)
    points = np.concatenate([ties, MAGNITUDES.astype(np.float32)])
    points = np.concatenate([points, np.nextafter(points, np.float32(-1)), np.nextafter(points, np.float32(1e9))])
    points = np.concatenate([points, -points])
    expected = nearest_code(points.astype(np.float64))
    assert codec.encode(points).tolist() == expected.tolist()
    assert points.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist() == expected.tolist()


def test_encode_saturates_and_keeps_nan(codec: Codec) -> None:
    big = np.array([448, 448.00003, 463.99997, 464, 464.00003, 480, 1e4, 3.4e38, np.inf], np.float32)
    assert codec.encode(big).tolist() == [0x7E] * big.size
    assert codec.encode(-big).tolist() == [0xFE] * big.size
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    assert codec.encode(nans.view(np.float32)).tolist() == [0x7F] * 3 + [0xFF] * 3


def test_encode_of_f32_denormals_and_fp8_denormals(codec: Codec) -> None:
    tiny = np.array([0.0, 1e-45, 1.1754942e-38, 2**-11, 2**-10], np.float32)
    assert codec.encode(tiny).tolist() == [0] * tiny.size
    assert codec.encode(-tiny).tolist() == [0x80] * tiny.size
    x = np.array([np.nextafter(np.float32(2**-10), np.float32(1)), 3 * 2**-10, 7.5 * 2**-9, 8 * 2**-9], np.float32)
    assert codec.encode(x).tolist() == [1, 2, 8, 8]


def test_encode_of_a_million_bit_patterns(codec: Codec) -> None:
    patterns = np.random.default_rng(8).integers(0, 2**32, 1 << 20, dtype=np.uint32)
    # Half of them from 2^-11 to 2^9, where FP8 has its values.
    patterns[::2] = (patterns[::2] & 0x80000000) | (0x3A000000 + patterns[::2] % 0x0A000000)
    x = patterns.view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs among them
        expected = nearest_code(x.astype(np.float64))
    np.testing.assert_array_equal(codec.encode(x), expected)


@pytest.mark.parametrize("n", [0, 1, 7, 31, 32, 33, 100])
def test_lengths_that_are_no_multiple_of_a_vector(codec: Codec, n: int) -> None:
    x = np.linspace(-500, 500, n).astype(np.float32)
    codes = codec.encode(x)
    assert codes.tolist() == nearest_code(x.astype(np.float64)).tolist()
    assert bits(codec.decode(codes)).tolist() == bits(VALUES[codes].astype(np.float32)).tolist()


def test_an_unknown_instruction_set_is_refused() -> None:
    assert not set_isa(load_table("cpu").library, "sse9")
