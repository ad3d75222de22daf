"""Sharded safetensors with an index, as model.save_pretrained lays them out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

INDEX = "model.safetensors.index.json"
# A huge page. What is written in such pieces stays in Linux's cache as huge pages, where the file system has them
# (ext4 since 6.16, XFS): a mapping of it then costs the CPU kernels hardly any misses of the TLB.
PIECE_BYTES = 2 << 20


class ShardWriter:
    """Collects tensors and writes a shard when `shard_bytes` are reached: memory holds one and its serialised form."""

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
            self._unnumbered(number).chmod(0o644)  # whatever the umask: a service may run as another user
            self._unnumbered(number).rename(self._directory / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        self._shards.append(list(self._pending))
        data = memoryview(save(self._pending, metadata={"format": "pt"}))
        with self._unnumbered(len(self._shards)).open("wb") as file:
            for begin in range(0, len(data), PIECE_BYTES):
                file.write(data[begin : begin + PIECE_BYTES])  # larger than its buffer, so written as it is
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _unnumbered(self, number: int) -> Path:
        return self._directory / f"model-{number:05d}.safetensors"
