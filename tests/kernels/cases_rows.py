"""Problems of the row-wise operations: shapes with 0, 1, partial vectors and blocks, and the sizes of real models."""

from dataclasses import dataclass

ROWS = [0, 1, 2, 17, 64]
# Columns: one, less than a vector, vectors and a rest, around an FP8 group, SmolLM2, GLM-4.7.
COLS = [1, 7, 64, 100, 127, 128, 129, 576, 1536, 5120]


@dataclass(frozen=True)
class RowsCase:
    rows: int
    cols: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


ROW_CASES = [*(RowsCase(3, cols) for cols in COLS), *(RowsCase(rows, 576) for rows in ROWS)]


@dataclass(frozen=True)
class QkCase:
    """`spans`: for each sequence the position of its first row and its number of rows."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    norm: bool
    spans: tuple[tuple[int, int], ...] = ((14, 5), (0, 1), (31, 2))

    def __str__(self) -> str:
        norm = "norm" if self.norm else "plain"
        return f"h{self.heads}k{self.kv_heads}d{self.head_dim}r{self.rotary_dim}-{norm}-{len(self.spans)}"


QK_CASES = [
    QkCase(9, 3, 64, 64, False),
    QkCase(9, 3, 128, 64, True),
    QkCase(12, 1, 128, 64, True),
    QkCase(4, 2, 40, 12, True),
    QkCase(2, 2, 8, 2, True),
    QkCase(1, 1, 16, 0, True),
    QkCase(3, 1, 64, 32, True, ((0, 49),)),
    QkCase(3, 1, 64, 32, True, ()),
]
