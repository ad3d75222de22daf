"""Weights of a model that nobody has the checkpoint of: its shapes run, and its speed is measured, without files.

The values are independent, of mean 0 and a variance that keeps activations of order 1 through any number of layers
(Glorot and Bengio 2010; blocks that add to the residual stream are scaled down with depth as in GPT-2, Radford et al.
2019). Each tensor's seed follows from its name, so that slices of it on several ranks agree with the whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from engine_worker.runtime.records import Synthetic, TensorSource
from engine_worker.weights.records import Experts, Matrix, Part, Vector, WeightFormat, blocks

_FP8_MAX = 448.0
_UNIT_SPREAD = math.sqrt(3)  # an even distribution over +- this has variance 1
_ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
# What checkpoints keep out of quantisation: suffixes of modules.
_NEVER_QUANTIZED = ("embed_tokens", "lm_head", "mlp.gate")


class SyntheticManifest:
    """Declares what a Manifest does, of tensors that are made up."""

    def __init__(self, fp8_format: WeightFormat | None, plain_format: WeightFormat, num_layers: int, seed: int) -> None:
        """`plain_format`, F32 or BF16, is that of what is not quantised."""
        self._fp8_format = fp8_format
        self._plain_format = plain_format
        self._branch_scale = 1 / math.sqrt(2 * num_layers)
        self._seed = seed
        self._sources: dict[str, TensorSource] = {}

    def vector(self, name: str, tensor: str, size: int) -> Vector:
        """Norm weights are 1, biases 0."""
        self._add(tensor, "F32", (size,), mean=1.0 if tensor.endswith("norm.weight") else 0.0)
        return Vector(name, size, tensor)

    def matrix(self, name: str, modules: Sequence[tuple[str, int]], cols: int, *, bias: bool = False) -> Matrix:
        bound = [self._weight(module, rows, cols) for module, rows in modules]
        if bias:
            for module, rows in modules:
                self._add(f"{module}.bias", "F32", (rows,))
        parts = [
            Part(f"{module}.weight", (0, rows), (0, cols), scale, f"{module}.bias" if bias else None)
            for (module, rows), (_, scale) in zip(modules, bound, strict=True)
        ]
        return Matrix(name, bound[0][0], sum(rows for _, rows in modules), cols, tuple(parts))

    def experts(self, name: str, module: str, count: int, rows: int, cols: int) -> Experts:
        for e in range(count):
            self._weight(module.format(e=e), rows, cols)
        weight_format, scale = self._weight_form(module)
        return Experts(name, weight_format, 0, count, rows, cols, f"{module}.weight", scale)

    def waive(self, tensor: str) -> None:
        """There is nothing that would not be needed."""

    def waive_prefix(self, prefix: str) -> None:
        """See waive."""

    def require_unit_scale(self, tensor: str) -> None:
        """There are no cache scales."""

    def close(self) -> tuple[TensorSource, ...]:
        return tuple(self._sources.values())

    def _weight_form(self, module: str) -> tuple[WeightFormat, str | None]:
        """The format of a module's weight and the name of its scale."""
        if self._fp8_format is None or module.endswith(_NEVER_QUANTIZED):
            return self._plain_format, None
        return self._fp8_format, f"{module}.weight_scale"

    def _weight(self, module: str, rows: int, cols: int) -> tuple[WeightFormat, str | None]:
        weight_format, scale = self._weight_form(module)
        spread = _UNIT_SPREAD * self._deviation(module, cols)
        if scale is None:
            self._add(f"{module}.weight", "BF16" if weight_format is WeightFormat.BF16 else "F32", (rows, cols), spread)
            return weight_format, None
        self._add(f"{module}.weight", "F8_E4M3", (rows, cols), _FP8_MAX)
        shape = (rows, 1) if weight_format is WeightFormat.FP8_CHANNEL else (blocks(rows), blocks(cols))
        self._add(scale, "F32", shape, mean=spread / _FP8_MAX)
        return weight_format, scale

    def _deviation(self, module: str, cols: int) -> float:
        if module.endswith("embed_tokens"):
            return 1.0
        branch = self._branch_scale if module.endswith(("o_proj", "down_proj")) else 1.0
        return branch / math.sqrt(cols)

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], spread: float = 0.0, *, mean: float = 0.0) -> None:
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        values = Synthetic(int.from_bytes(digest), mean, spread)
        nbytes = math.prod(shape) * _ELEMENT_BYTES[dtype]
        self._sources[name] = TensorSource(name, None, 0, nbytes, dtype, shape, values)
