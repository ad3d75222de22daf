"""Weights as a plan names them: plan name -> checkpoint tensors and the slices of them that this rank holds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    def take_rows(self, spans: Sequence[Span]) -> Matrix:
        """Of each part the rows in its span, counted from the part's first."""
        parts = tuple(
            replace(part, rows=_within(part.rows, span)) for part, span in zip(self.parts, spans, strict=True)
        )
        return replace(self, rows=sum(end - first for first, end in spans), parts=parts)

    def take_cols(self, span: Span) -> Matrix:
        """A share of the input channels: its products are partial sums. No bias: every share would add it."""
        assert not any(part.bias for part in self.parts), f"{self.name} has a bias"
        parts = tuple(replace(part, cols=_within(part.cols, span)) for part in self.parts)
        return replace(self, cols=span[1] - span[0], parts=parts)


@dataclass(frozen=True, slots=True)
class Placement:
    """The order in which ranks hold a layer's experts: expert experts[i] is at place i. A permutation."""

    name: str
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts at places first .. first+count-1, each [rows][cols]; `{e}` in `tensor` and `scale` is the expert's id.

    Without a placement an expert's place is its id.
    `row` and `col` are where the expert's own tensor has the first of them.
    """

    name: str
    format: WeightFormat
    first: int
    count: int
    rows: int
    cols: int
    tensor: str
    scale: str | None
    row: int = 0
    col: int = 0
    placement: Placement | None = None

    def take(self, experts: Span) -> Experts:
        """Experts counted from the first."""
        return replace(self, first=self.first + experts[0], count=experts[1] - experts[0])

    def take_rows(self, span: Span) -> Experts:
        return replace(self, row=self.row + span[0], rows=span[1] - span[0])

    def take_cols(self, span: Span) -> Experts:
        """A share of the input channels: its products are partial sums."""
        return replace(self, col=self.col + span[0], cols=span[1] - span[0])


def _within(outer: Span, inner: Span) -> Span:
    return outer[0] + inner[0], outer[0] + inner[1]


Weight = Vector | Matrix | Experts
