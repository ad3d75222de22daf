"""What an op writes, read from an engine and compared with what another table's op wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_worker.plan.record import Buffer, Op
from engine_worker.runtime.abi import Engine

Values = dict[str, NDArray[Any]]  # by argument key, as they lie in memory: bf16 as uint16, FP8 as uint8

_WRITTEN = MappingProxyType(
    {
        "embed": ("out",),
        "rms_norm": ("residual", "out", "q", "scale"),
        "quantize": ("q", "scale"),
        "linear": ("out",),
        "qk_norm_rope_store": ("out",),
        "paged_attention": ("out",),
        "silu_mul": ("out", "q", "scale"),
        "moe_route": ("ids", "weights"),
        "moe_group": ("offsets", "order"),
        "moe_gate_up": ("out", "q", "scale"),
        "moe_down": ("out",),
        "moe_down_each": ("out",),
        "all_reduce": ("x",),
        "gather_rows": ("out",),
        "sample": (),
    }
)
_DTYPES = MappingProxyType({"f32": np.float32, "bf16": np.uint16, "fp8": np.uint8, "i32": np.int32})
_EXACT = ("ids", "offsets", "order")


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest error of one output over its rows, |a - b| / |b| in 2-norms; infinite where integers differ."""

    key: str
    buffer: str
    row: int
    error: float


def written(op: Op) -> dict[str, Buffer]:
    """The buffers that the op writes, by key."""
    return {key: value for key in _WRITTEN[op.kind] if isinstance(value := op.args.get(key), Buffer)}


def read(engine: Engine, op: Op, rows: int, samples: int) -> Values:
    """What the op just wrote in a step of so many rows."""
    return {key: read_buffer(engine, buffer, rows, samples) for key, buffer in written(op).items()}


def read_buffer(engine: Engine, buffer: Buffer, rows: int, samples: int) -> NDArray[Any]:
    shape = (buffer.rows.count(rows, samples), buffer.cols)
    return engine.read_buffer(buffer.name, shape, _DTYPES[buffer.dtype])


def compare(op: Op, ours: Values, theirs: Values, rows: Mapping[str, Sequence[int]]) -> list[Difference]:
    """One entry an output. `rows`: those that the op writes, of outputs of which it does not write all."""
    found = []
    for key, buffer in written(op).items():
        chosen = np.array(rows.get(key, range(len(ours[key]))), np.int64)
        a, b = ({name: value[chosen] for name, value in _with_companions(key, values)} for values in (ours, theirs))
        if key in _EXACT:
            errors = _unequal(op, key, a, b)
        else:
            errors = _relative(_numbers(buffer, key, a), _numbers(buffer, key, b))
        if len(errors):
            worst = int(np.argmax(errors))
            found.append(Difference(key, buffer.name, int(chosen[worst]), float(errors[worst])))
    return found


def _with_companions(key: str, values: Values) -> list[tuple[str, NDArray[Any]]]:
    """An output, and the others that say what its numbers mean."""
    companions = {"q": ("q", "scale"), "ids": ("ids", "weights")}
    return [(name, values[name]) for name in companions.get(key, (key,))]


def _unequal(op: Op, key: str, ours: Values, theirs: Values) -> NDArray[np.float64]:
    """Infinite for rows of other integers. Experts that swap places because their scores are equal count as equal."""
    different = ours[key] != theirs[key]
    if op.kind == "moe_route":
        a, b = ours["weights"].astype(np.float64), theirs["weights"].astype(np.float64)
        different &= np.abs(a - b) > 1e-5 * np.abs(b)
    return np.where(different.any(axis=1), np.inf, 0.0)


def _relative(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    difference = np.linalg.norm(ours - theirs, axis=1)
    size = np.linalg.norm(theirs, axis=1)
    same = difference == 0
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = np.where(same, 0.0, difference / size)
    return np.where(np.isnan(errors), np.inf, errors)


def _numbers(buffer: Buffer, key: str, values: Values) -> NDArray[np.float64]:
    """FP8 is multiplied out with its scales: where those differ in the last bit, so may the codes."""
    raw = values[key]
    if buffer.dtype == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if buffer.dtype != "fp8":
        return raw.astype(np.float64)
    scale = values["scale"].astype(np.float64)
    group = -(-raw.shape[1] // scale.shape[1]) if scale.shape[1] == 1 else 128
    return _FP8[raw] * np.repeat(scale, group, axis=1)[:, : raw.shape[1]]


def _fp8_values() -> NDArray[np.float64]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes >= 128, -magnitude, magnitude)


_FP8 = _fp8_values()
