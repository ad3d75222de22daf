"""Sharded safetensors with an index, as model.save_pretrained lays them out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"


class ShardWriter:
    """Collects tensors and writes a shard when `shard_bytes` are reached: memory never holds more than one."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._pending: dict[str, npt.NDArray[Any]] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: npt.NDArray[Any]) -> None:
        self._pending[name] = np.ascontiguousarray(tensor)
        self._pending_bytes += tensor.nbytes
        if self._pending_bytes >= self._shard_bytes:
            self._flush()

    def close(self) -> None:
        """Write the last shard and the index; shard names hold the count, which is known only now."""
        if self._pending:
            self._flush()
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            file = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            self._unnumbered(number).chmod(0o644)  # safetensors writes 0600; a service may run as another user
            self._unnumbered(number).rename(self._directory / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        self._shards.append(list(self._pending))
        save_file(self._pending, self._unnumbered(len(self._shards)), metadata={"format": "pt"})
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _unnumbered(self, number: int) -> Path:
        return self._directory / f"model-{number:05d}.safetensors"
