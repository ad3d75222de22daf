"""How fast a checkpoint comes to a GPU, beside what link and file give: `python -m tests.bench.loading --out FILE`.

Writes a checkpoint of some GB in the shapes of GLM-4.7-FP8, and loads it: page cache warm and, from a disk, cold.
Ceilings of the same run: copies from page-locked memory to the GPU, and all threads reading the file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine_worker.models import build_model
from engine_worker.profile.shape import StepShape, options_for
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import TensorSource
from tests.bench.cuda_bench import CudaBench
from tests.bench.rank_slice import CONFIG

# One dense layer and one of experts, without the most of the vocabulary: about 4.6 GB.
SMALLER: dict[str, int] = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 48,
    "intermediate_size": 6144,
    "vocab_size": 16384,
    "eos_token_id": 0,
}
_BLOCK = 8 << 20


def write_checkpoint(directory: Path) -> Path:
    """config.json and one shard; returns the shard's path."""
    (directory / "config.json").write_text(json.dumps(json.loads(CONFIG.read_text()) | SMALLER))
    sources = build_model(directory, synthetic_seed=0).tensors
    header, offset = {}, 0
    for source in sources:
        end = offset + source.nbytes
        header[source.name] = {"dtype": source.dtype, "shape": source.shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    shard = directory / "model.safetensors"
    codes = np.random.default_rng(0).integers(0, 0x7F, _BLOCK, np.uint8).tobytes()  # no NaN
    with shard.open("wb", buffering=0) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for source in sources:
            write_tensor(file, source, codes)
        os.fsync(file.fileno())
    return shard


def write_tensor(file: Any, source: TensorSource, codes: bytes) -> None:
    if source.dtype == "F8_E4M3":
        for begin in range(0, source.nbytes, _BLOCK):
            file.write(codes[: min(_BLOCK, source.nbytes - begin)])
    else:
        file.write(bytes(source.nbytes))


def forget(shard: Path) -> None:
    """Out of the page cache."""
    with shard.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Load:
    """One start of an engine."""

    nbytes: int
    seconds: float  # from the first byte of weights that is read to the last one's arrival
    before: float  # from a recorded plan: context, page-locked memory, scales
    after: float  # until the engine can step: graphs, KV pages

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9


def load(directory: Path, synthetic_seed: int | None = None) -> Load:
    model = build_model(directory, synthetic_seed=synthetic_seed)
    reports: list[tuple[float, int]] = []
    options = replace(
        options_for(model, "cuda", [StepShape(1, 16)]),
        progress=lambda done, _: reports.append((time.perf_counter(), done)),
    )
    start = time.perf_counter()
    with Engine.create(options):
        ready = time.perf_counter()
    (began, _), (ended, nbytes) = reports[0], reports[-1]
    return Load(nbytes, ended - began, began - start, ready - ended)


def told(name: str, loads: list[Load]) -> dict[str, float]:
    """Of the fastest load."""
    best = min(loads, key=lambda one: one.seconds)
    return {f"{name}_load_gb_per_s": best.gb_per_s, f"{name}_before_s": best.before, f"{name}_after_s": best.after}


def read_rate(shard: Path, threads: int) -> float:
    """Bytes a second of all threads reading the file, each its share."""
    size = shard.stat().st_size
    share = -(-size // threads)

    def read(index: int) -> None:
        buffer = memoryview(bytearray(_BLOCK))
        with shard.open("rb", buffering=0) as file:
            file.seek(index * share)
            left = min(share, size - index * share)
            while left > 0:
                left -= file.readinto(buffer[: min(left, _BLOCK)])

    workers = [threading.Thread(target=read, args=(index,)) for index in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return size / (time.perf_counter() - start)


def link_rate(size: int = 1 << 30) -> float:
    """Bytes a second of a copy from page-locked memory to the GPU, best of five."""
    bench = CudaBench()
    host = ctypes.c_void_p()
    bench.call("glm_cuda_host_alloc", ctypes.c_size_t(size), ctypes.byref(host))
    device = bench.alloc(size)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        bench.call("glm_cuda_copy_in", ctypes.c_void_p(device), host, ctypes.c_size_t(size))
        bench.call("glm_cuda_synchronize")
        best = min(best, time.perf_counter() - start)
    bench.call("glm_cuda_memory_free", ctypes.c_void_p(device))
    bench.call("glm_cuda_host_free", host)
    return size / best


def measure(directory: Path, cold: bool) -> dict[str, float]:
    threads = len(os.sched_getaffinity(0))
    shard = write_checkpoint(directory)
    result = {"shard_gb": shard.stat().st_size / 1e9, "threads": threads, "link_gb_per_s": link_rate() / 1e9}
    if cold:
        forget(shard)
        result["cold_file_gb_per_s"] = read_rate(shard, threads) / 1e9
        forget(shard)
        result |= told("cold", [load(directory)])
    result["warm_file_gb_per_s"] = max(read_rate(shard, threads) for _ in range(3)) / 1e9
    result |= told("warm", [load(directory) for _ in range(3)])
    result |= told("synthetic", [load(directory, 0) for _ in range(3)])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="for the checkpoint")
    parser.add_argument("--cold", action="store_true", help="the directory is on a disk")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        result = measure(Path(directory), arguments.cold)
    for name, value in result.items():
        print(f"{name:24} {value:.2f}")
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
