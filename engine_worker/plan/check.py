"""What an operation demands of its operands (kernels/include/glm/kernels.h), checked when it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_worker.errors import WorkerError
from engine_worker.plan.record import ActDtype, Buffer, BufferDtype, PlanName, Rows, Size
from engine_worker.weights.records import Matrix, Vector, WeightFormat, blocks

MAX_PARTS = 4  # GLM_MAX_PARTS


class PlanError(WorkerError):
    """A model file recorded a call whose operands do not fit; the message begins with the call's label."""


@dataclass(frozen=True, slots=True)
class OpCheck:
    """The checks of one call."""

    plan: PlanName
    act: ActDtype
    label: str

    def that(self, holds: bool, message: str) -> None:
        if not holds:
            raise PlanError(f"{self.label}: {message}")

    def buffer(
        self, key: str, buffer: Buffer, dtypes: BufferDtype | Sequence[BufferDtype], rows: Rows, cols: int
    ) -> None:
        allowed = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
        self.that(
            buffer.dtype in allowed, f"{key}={buffer.name} has dtype {buffer.dtype}, expected {' or '.join(allowed)}"
        )
        self.that(buffer.cols == cols, f"{key}={buffer.name} has {buffer.cols} columns, expected {cols}")
        self.that(
            self._one_step(buffer.rows) == self._one_step(rows),
            f"{key}={buffer.name} has rows {buffer.rows}, expected {rows}",
        )

    def activation(self, key: str, buffer: Buffer, rows: Rows, cols: int) -> None:
        self.buffer(key, buffer, self.act, rows, cols)

    def quantized(self, keys: tuple[str, str], q: Buffer | None, scale: Buffer | None, rows: Rows, cols: int) -> None:
        """An FP8 operand and its scales come together: one a row, or one for each group of 128 columns."""
        self.that((q is None) == (scale is None), f"{keys[0]} and {keys[1]} come together")
        if q is not None and scale is not None:
            self.buffer(keys[0], q, "fp8", rows, cols)
            self.buffer(keys[1], scale, "f32", rows, 1 if scale.cols == 1 else blocks(cols))

    def scales_suit(self, scale: Buffer, weight_format: WeightFormat, cols: int) -> None:
        """Activations are quantised the way their weight is."""
        expected = 1 if weight_format is WeightFormat.FP8_CHANNEL else blocks(cols)
        self.that(
            scale.cols == expected,
            f"x_scale={scale.name} has {scale.cols} columns, {weight_format.value} takes {expected}",
        )

    def vector(self, key: str, vector: Vector, size: int) -> None:
        self.that(vector.size == size, f"{key}={vector.name} has {vector.size} values, expected {size}")

    def float_matrix(self, key: str, matrix: Matrix) -> None:
        self.that(not matrix.format.is_fp8, f"{key}={matrix.name} is {matrix.format.value}, expected f32, bf16 or f16")
        self.that(len(matrix.parts) == 1, f"{key}={matrix.name} has {len(matrix.parts)} parts, expected 1")

    def _one_step(self, rows: Rows) -> Rows:
        """In a decode step every row is sampled: S is T."""
        return Rows(Size.TOKENS, rows.factor) if self.plan == "decode" and rows.size is Size.SAMPLES else rows
