"""Weights as a plan names them: plan name -> checkpoint tensors and the slices of them that this rank holds."""

from __future__ import annotations

import enum
from dataclasses import dataclass

Span = tuple[int, int]  # first, and one past the last
FP8_BLOCK = 128  # GLM_FP8_BLOCK: side of a weight scale block, length of an activation group


def blocks(size: int) -> int:
    """How many blocks `size` rows or columns take; the last may be short."""
    return -(-size // FP8_BLOCK)


class WeightFormat(enum.Enum):
    """How a weight's bytes become numbers: glm_weight_format."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    FP8_CHANNEL = "fp8_channel"
    FP8_BLOCK = "fp8_block"

    @property
    def is_fp8(self) -> bool:
        return self in (WeightFormat.FP8_CHANNEL, WeightFormat.FP8_BLOCK)

    @property
    def element_bytes(self) -> int:
        return {WeightFormat.F32: 4, WeightFormat.BF16: 2, WeightFormat.F16: 2}.get(self, 1)


@dataclass(frozen=True, slots=True)
class Vector:
    """f32 [size], converted when loaded."""

    name: str
    size: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of one checkpoint tensor."""

    tensor: str
    rows: Span
    cols: Span
    scale: str | None
    bias: str | None


@dataclass(frozen=True, slots=True)
class Matrix:
    """[rows][cols], output channels first: the parts' rows one after another."""

    name: str
    format: WeightFormat
    rows: int
    cols: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts first .. first+count-1, each [rows][cols]; `{e}` in `tensor` and `scale` is the expert's global id."""

    name: str
    format: WeightFormat
    first: int
    count: int
    rows: int
    cols: int
    tensor: str
    scale: str | None


Weight = Vector | Matrix | Experts
