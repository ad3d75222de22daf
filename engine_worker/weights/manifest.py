"""Binds the weights that a model declares to the checkpoint's tensors, checks each, and accounts for every tensor.

A weight is quantised if and only if a scale tensor lies beside it; the scale's shape tells per-channel from block
scales.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from engine_worker.errors import CheckpointError, UnsupportedError
from engine_worker.runtime.records import TensorSource
from engine_worker.weights.records import FP8_BLOCK, Experts, Matrix, Part, Vector, WeightFormat, blocks
from engine_worker.weights.safetensors_index import Checkpoint

SCALE_SUFFIXES = ("weight_scale", "weight_scale_inv")  # both are multipliers: w = fp8 * scale
FP8_DTYPE = "F8_E4M3"
_FLOAT_FORMATS = {"F32": WeightFormat.F32, "BF16": WeightFormat.BF16, "F16": WeightFormat.F16}
_SCALAR_CODES = {"F32": "<f", "F16": "<e"}


class Declarer(Protocol):
    """What a model file declares its weights to; see Manifest for the meanings."""

    def vector(self, name: str, tensor: str, size: int) -> Vector: ...

    def matrix(self, name: str, modules: Sequence[tuple[str, int]], cols: int, *, bias: bool = False) -> Matrix: ...

    def experts(self, name: str, module: str, count: int, rows: int, cols: int) -> Experts: ...

    def waive(self, tensor: str) -> None: ...

    def waive_prefix(self, prefix: str) -> None: ...

    def require_unit_scale(self, tensor: str) -> None: ...

    def close(self) -> tuple[TensorSource, ...]: ...


class Manifest:
    """Declarations return the plan's weight records; `close` raises if a tensor was neither declared nor waived."""

    def __init__(self, checkpoint: Checkpoint, fp8_format: WeightFormat | None) -> None:
        """`fp8_format` is the one that config.json declares, None if it declares no quantisation."""
        self._checkpoint = checkpoint
        self._fp8_format = fp8_format
        self._unclaimed = dict(checkpoint.tensors)
        self._used: dict[str, TensorSource] = {}

    def vector(self, name: str, tensor: str, size: int) -> Vector:
        """A float tensor [size], read as f32. All methods raise CheckpointError naming the tensor and its shard."""
        self._float_tensor(tensor, (size,))
        return Vector(name, size, tensor)

    def matrix(self, name: str, modules: Sequence[tuple[str, int]], cols: int, *, bias: bool = False) -> Matrix:
        """`modules` are (prefix of `.weight`, output channels), to be computed as one linear: one format for all."""
        parts = []
        formats = []
        for module, rows in modules:
            weight_format, scale = self._weight(module, rows, cols)
            bias_name = f"{module}.bias" if bias else None
            if bias_name is not None:
                self._float_tensor(bias_name, (rows,))
            formats.append(weight_format)
            parts.append(Part(f"{module}.weight", (0, rows), (0, cols), scale, bias_name))
        self._check_one_format([part.tensor for part in parts], formats)
        return Matrix(name, formats[0], sum(rows for _, rows in modules), cols, tuple(parts))

    def experts(self, name: str, module: str, count: int, rows: int, cols: int) -> Experts:
        """Experts 0..count-1; `{e}` in `module` stands for the expert's id. One format for all of them."""
        bound = [self._weight(module.format(e=e), rows, cols) for e in range(count)]
        self._check_one_format([f"{module.format(e=e)}.weight" for e in range(count)], [found for found, _ in bound])
        weight_format, scale = bound[0]
        scale_template = None if scale is None else f"{module}.{scale.rpartition('.')[2]}"
        for e, (_, found) in enumerate(bound):
            if found is not None and scale_template is not None and found != scale_template.format(e=e):
                raise UnsupportedError(f"tensor {found}: expected {scale_template.format(e=e)}, as for expert 0")
        return Experts(name, weight_format, 0, count, rows, cols, f"{module}.weight", scale_template)

    def waive(self, tensor: str) -> None:
        """`tensor` is not needed, if it is there."""
        self._unclaimed.pop(tensor, None)

    def waive_prefix(self, prefix: str) -> None:
        """No tensor whose name begins with `prefix` is needed."""
        for name in [name for name in self._unclaimed if name.startswith(prefix)]:
            del self._unclaimed[name]

    def require_unit_scale(self, tensor: str) -> None:
        """A K or V cache scale: may be absent, and must be 1 if it is there."""
        if tensor not in self._checkpoint.tensors:
            return
        source = self._float_tensor(tensor, None)
        value = _read_scalar(source)
        if value != 1.0:
            raise UnsupportedError(
                f"tensor {tensor}: in shard {source.path}: {value}, only a cache scale of 1 is supported"
            )
        del self._used[tensor]

    def close(self) -> tuple[TensorSource, ...]:
        """The tensors in use, in order of declaration. Raises CheckpointError naming a tensor that nothing declared."""
        for name, source in self._unclaimed.items():
            others = len(self._unclaimed) - 1
            more = f" (and {others} more)" if others else ""
            raise CheckpointError(f"tensor {name}: in shard {source.path}: the model has no use for it{more}")
        return tuple(self._used.values())

    def _weight(self, module: str, rows: int, cols: int) -> tuple[WeightFormat, str | None]:
        """The format of `module`.weight, which must be [rows, cols], and the name of its scale."""
        name = f"{module}.weight"
        source = self._claim(name)
        _check_shape(source, (rows, cols))
        scales = [f"{module}.{suffix}" for suffix in SCALE_SUFFIXES if f"{module}.{suffix}" in self._checkpoint.tensors]
        if len(scales) > 1:
            raise CheckpointError(f"tensor {name}: has two scales, {scales[0]} and {scales[1]}")
        if not scales:
            if source.dtype not in _FLOAT_FORMATS:
                needed = f"; {FP8_DTYPE} needs {module}.{SCALE_SUFFIXES[0]}" if source.dtype == FP8_DTYPE else ""
                raise _wrong_dtype(source, ", ".join(_FLOAT_FORMATS) + needed)
            return _FLOAT_FORMATS[source.dtype], None
        if source.dtype != FP8_DTYPE:
            raise _wrong_dtype(source, f"{FP8_DTYPE}, because {scales[0]} is there")
        return self._scale_format(scales[0], rows, cols), scales[0]

    def _scale_format(self, name: str, rows: int, cols: int) -> WeightFormat:
        source = self._float_tensor(name, None)
        shapes: dict[tuple[int, ...], WeightFormat] = {
            (blocks(rows), blocks(cols)): WeightFormat.FP8_BLOCK,
            (rows, 1): WeightFormat.FP8_CHANNEL,
        }
        found = shapes.get(source.shape)
        where = f"tensor {name}: in shard {source.path}"
        if found is None:
            raise CheckpointError(
                f"{where}: shape {list(source.shape)}, expected {[rows, 1]} (a scale per output channel) or "
                f"{[blocks(rows), blocks(cols)]} (a scale per {FP8_BLOCK}x{FP8_BLOCK} block)"
            )
        if found is not self._fp8_format:
            declared = self._fp8_format.value if self._fp8_format else "no quantization_config"
            raise CheckpointError(f"{where}: is a scale of {found.value}, but config.json declares {declared}")
        return found

    def _check_one_format(self, tensors: Sequence[str], formats: Sequence[WeightFormat]) -> None:
        for tensor, found in zip(tensors, formats, strict=True):
            if found is not formats[0]:
                raise UnsupportedError(
                    f"tensor {tensors[0]} is {formats[0].value} but tensor {tensor} is {found.value}: weights that are "
                    "computed together must have one format"
                )

    def _float_tensor(self, name: str, shape: tuple[int, ...] | None) -> TensorSource:
        source = self._claim(name)
        if source.dtype not in _FLOAT_FORMATS:
            raise _wrong_dtype(source, ", ".join(_FLOAT_FORMATS))
        if shape is not None:
            _check_shape(source, shape)
        return source

    def _claim(self, name: str) -> TensorSource:
        source = self._checkpoint.tensors.get(name)
        if source is None:
            raise CheckpointError(f"tensor {name}: missing from the checkpoint in {self._checkpoint.directory}")
        self._unclaimed.pop(name, None)
        self._used[name] = source
        return source


def _check_shape(source: TensorSource, shape: tuple[int, ...]) -> None:
    if source.shape != shape:
        raise CheckpointError(
            f"tensor {source.name}: in shard {source.path}: shape {list(source.shape)}, expected {list(shape)}"
        )


def _wrong_dtype(source: TensorSource, expected: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {source.name}: in shard {source.path}: dtype {source.dtype}, expected one of {expected}"
    )


def _read_scalar(source: TensorSource) -> float:
    if source.shape not in ((), (1,)):
        raise CheckpointError(f"tensor {source.name}: in shard {source.path}: shape {list(source.shape)}, expected [1]")
    assert source.path is not None, "a checkpoint's tensors are in files"
    with source.path.open("rb") as file:
        file.seek(source.offset)
        data = file.read(source.nbytes)
    if source.dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    return float(struct.unpack(_SCALAR_CODES[source.dtype], data)[0])
