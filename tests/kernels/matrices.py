"""Random weights and activations of every format, with their float64 values: what linear and the expert tests share."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels import abi
from tests.kernels.harness import ABSENT, BF16, F16, F32, FP8, Array, BoundTensor, BoundWeight, Buffer, F64Array, tensor
from tests.kernels.harness import weight as bind_weight

Dtype = np.dtype[Any]
Format = abi.WeightFormat

STORED = {Format.F32: F32, Format.BF16: BF16, Format.F16: F16, Format.FP8_CHANNEL: FP8, Format.FP8_BLOCK: FP8}
FP8_FORMATS = (Format.FP8_CHANNEL, Format.FP8_BLOCK)


def blocks(n: int) -> int:
    return -(-n // abi.FP8_BLOCK)


def spread(scale: Array, rows: int, cols: int) -> F64Array:
    """Block scales [ceil(rows/128)][ceil(cols/128)] at every element."""
    whole = np.repeat(np.repeat(scale.astype(np.float64), abi.FP8_BLOCK, 0), abi.FP8_BLOCK, 1)
    part: F64Array = whole[:rows, :cols]
    return part


def random_fp8(rng: np.random.Generator, rows: int, cols: int) -> Array:
    """All finite codes, denormals and both zeros included."""
    codes = rng.integers(0, 127, (rows, cols), np.uint8) | rng.integers(0, 2, (rows, cols), np.uint8) << 7
    numbers: Array = codes.view(FP8)
    return numbers


@dataclass
class Weights:
    """[rows][cols], stored in a wider matrix when `gap` > 0."""

    format: Format
    data: Array
    scale: Array | None
    gap: int = 0

    @property
    def value(self) -> F64Array:
        data = self.data.astype(np.float64)
        if self.scale is None:
            return data
        if self.format == Format.FP8_CHANNEL:
            return data * self.scale.astype(np.float64)[:, None]
        return data * spread(self.scale, *data.shape)

    def bind(self) -> "BoundMatrix":
        rows, cols = self.data.shape
        # 0xff is NaN in every float format: a kernel that reads the gap shows it.
        wide = np.full((rows, (cols + self.gap) * self.data.dtype.itemsize), 0xFF, np.uint8).view(self.data.dtype)
        wide[:, :cols] = self.data
        return BoundMatrix(bind_weight(wide, self.scale))


@dataclass
class BoundMatrix:
    weight: BoundWeight

    @property
    def struct(self) -> abi.Weight:
        return self.weight.struct


def random_weights(rng: np.random.Generator, fmt: Format, rows: int, cols: int, gap: int = 0) -> Weights:
    if fmt not in FP8_FORMATS:
        return Weights(fmt, (rng.standard_normal((rows, cols)) * 0.1).astype(STORED[fmt]), None, gap)
    shape = (rows,) if fmt == Format.FP8_CHANNEL else (blocks(rows), blocks(cols))
    scale = rng.uniform(1e-4, 1e-2, shape).astype(np.float32)
    return Weights(fmt, random_fp8(rng, rows, cols), scale, gap)


@dataclass
class Activations:
    data: Array
    scale: Array | None = None

    @property
    def value(self) -> F64Array:
        data = self.data.astype(np.float64)
        if self.scale is None:
            return data
        if self.scale.shape[1] == 1:
            return data * self.scale.astype(np.float64)
        return data * np.repeat(self.scale.astype(np.float64), abi.FP8_BLOCK, 1)[:, : data.shape[1]]

    def rows(self, index: Array | Sequence[int] | slice) -> "Activations":
        return Activations(self.data[index], None if self.scale is None else self.scale[index])

    def bind(self) -> "BoundActivations":
        cols = self.data.shape[1]
        return BoundActivations(
            tensor(self.data, cols + 5),
            None if self.scale is None else tensor(self.scale, self.scale.shape[1] + 2),
        )


@dataclass
class BoundActivations:
    x: BoundTensor
    scale: BoundTensor | None

    @property
    def scale_struct(self) -> abi.Tensor:
        return ABSENT if self.scale is None else self.scale.struct


def random_activations(rng: np.random.Generator, fmt: Format, rows: int, cols: int, act: Dtype) -> Activations:
    if fmt not in FP8_FORMATS:
        return Activations(rng.standard_normal((rows, cols)).astype(act))
    groups = 1 if fmt == Format.FP8_CHANNEL else blocks(cols)
    return Activations(random_fp8(rng, rows, cols), rng.uniform(1e-3, 1e-1, (rows, groups)).astype(np.float32))


class BoundExperts:
    """One weight an expert, as the table wants them: an array of structs in device memory."""

    def __init__(self, weights: Sequence[Weights], first: int) -> None:
        self.bound = [weight.bind() for weight in weights]
        structs = (abi.Weight * len(self.bound))(*(bound.struct for bound in self.bound))
        self.array = Buffer(np.frombuffer(ctypes.string_at(structs, ctypes.sizeof(structs)), np.uint8))
        rows, cols = weights[0].data.shape
        self.struct = abi.ExpertWeights(self.array.pointer, weights[0].format, first, len(self.bound), rows, cols)
