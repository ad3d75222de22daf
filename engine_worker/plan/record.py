"""A plan in memory: what one kind of step does, as a list of calls. plan/dump.py writes it out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from engine_worker.weights.records import Experts, Matrix, Placement, Vector, Weight

PlanName = Literal["mixed", "decode"]
ActDtype = Literal["f32", "bf16"]
KvDtype = Literal["f32", "bf16", "fp8"]
BufferDtype = Literal["f32", "bf16", "fp8", "i32"]

DTYPE_BYTES = MappingProxyType({"f32": 4, "bf16": 2, "fp8": 1, "i32": 4})


class Size(enum.Enum):
    """What a number of rows is counted in."""

    TOKENS = "T"
    SAMPLES = "S"
    OWN = "O"
    ONE = ""


@dataclass(frozen=True, slots=True)
class Rows:
    """`factor` times T, S or one; or what each of `factor` ranks has of T to itself."""

    size: Size
    factor: int = 1

    def count(self, tokens: int, samples: int) -> int:
        """Of the rank that has most."""
        if self.size is Size.OWN:
            return -(-tokens // self.factor)
        return self.factor * {Size.TOKENS: tokens, Size.SAMPLES: samples, Size.ONE: 1}[self.size]


TOKENS = Rows(Size.TOKENS)
SAMPLES = Rows(Size.SAMPLES)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Scratch [rows][cols], reused from layer to layer."""

    name: str
    dtype: BufferDtype
    rows: Rows
    cols: int


@dataclass(frozen=True, slots=True)
class Rope:
    """cos/sin table over positions; Su et al. 2021."""

    name: str
    rotary_dim: int
    theta: float


@dataclass(frozen=True, slots=True)
class KvCache:
    layers: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype


Operand = Buffer | Vector | Matrix | Experts | Rope | Placement
Value = Operand | Rows | int | float


@dataclass(frozen=True, slots=True)
class Op:
    """One call: `kind` is the args struct of kernels.h, `args` its fields by the plan text's keys."""

    kind: str
    label: str
    args: MappingProxyType[str, Value]

    @property
    def rows(self) -> Rows:
        """T unless the call says otherwise."""
        rows = self.args.get("rows")
        return rows if isinstance(rows, Rows) else TOKENS


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one rank's executor needs for one kind of step."""

    name: PlanName
    meta: MappingProxyType[str, str | int]
    act: ActDtype
    vocab: int
    kv: KvCache
    ops: tuple[Op, ...]

    @property
    def operands(self) -> list[Operand]:
        """The distinct named operands, in order of first use."""
        found: dict[str, Operand] = {}
        for op in self.ops:
            for value in op.args.values():
                if isinstance(value, Operand):
                    found.setdefault(value.name, value)
        return list(found.values())

    @property
    def buffers(self) -> list[Buffer]:
        return [value for value in self.operands if isinstance(value, Buffer)]

    @property
    def ropes(self) -> list[Rope]:
        return [value for value in self.operands if isinstance(value, Rope)]

    @property
    def placements(self) -> list[Placement]:
        return [value for value in self.operands if isinstance(value, Placement)]

    @property
    def weights(self) -> list[Weight]:
        return [value for value in self.operands if isinstance(value, Weight)]
