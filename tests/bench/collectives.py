"""Sums over GPUs, from 1 KB to 64 MB: this table's peer-to-peer kernels beside NCCL; and what a decode step exchanges.

`python -m tests.bench.collectives [--json FILE]` on a machine with several GPUs. Every call is captured in a graph on
each GPU, back to back; the time is the slowest rank's, the best of 5 times 10 replays. NCCL is the machine's
libnccl.so.2 or the one that GLM_NCCL names; without one its column is empty.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.cuda_bench import CudaBench, tensor
from tests.bench.nccl import Nccl, load_nccl
from tests.kernels import abi
from tests.kernels.abi import Dtype, Op
from tests.kernels.cases_sample import request

HIDDEN, VOCAB = 5120, 151552
PATHS = {"by size": 0, "one shot": 1, "two shots": 2, "in place": 3}
MESSAGE_BYTES = 4 << 20  # the largest that is sent unasked
CALLS, REPLAYS, REPEATS = 20, 10, 5

Call = Callable[[CudaBench, int], None]


class Ranks:
    """A group of one rank on each GPU, each driven by a thread."""

    def __init__(self, num_ranks: int) -> None:
        self.benches = [CudaBench(ordinal) for ordinal in range(num_ranks)]
        self.threads = ThreadPoolExecutor(num_ranks)
        handles = (ctypes.c_void_p * num_ranks)(*(bench.handle for bench in self.benches))
        self.group, error = ctypes.c_void_p(), ctypes.create_string_buffer(512)
        create = self.benches[0].kernels.group_create
        if create(handles, num_ranks, ctypes.byref(self.group), error, len(error)) != abi.Status.OK:
            raise SystemExit(error.value.decode())

    def each(self, call: Callable[[CudaBench, int], Any]) -> list[Any]:
        return list(self.threads.map(call, self.benches, range(len(self.benches))))

    def microseconds(self, call: Call) -> float:
        """Of one of CALLS calls in a graph."""
        self.each(call)
        self.each(lambda bench, _: bench.call("glm_cuda_synchronize"))
        graphs = self.each(lambda bench, rank: _capture(bench, lambda: call(bench, rank)))
        best = float("inf")
        for _ in range(REPEATS):
            best = min(best, max(self.each(lambda bench, rank: _time(bench, graphs[rank]))))
        for bench, graph in zip(self.benches, graphs, strict=True):
            bench.call("glm_cuda_graph_free", graph)
        return best / CALLS

    @contextmanager
    def path(self, name: str) -> Iterator[None]:
        library = self.benches[0].library
        library.glm_cuda_set_reduce_path(PATHS[name])
        yield
        library.glm_cuda_set_reduce_path(PATHS["by size"])


def _capture(bench: CudaBench, call: Callable[[], None]) -> ctypes.c_void_p:
    graph = ctypes.c_void_p()
    bench.call("glm_cuda_graph_begin")
    for _ in range(CALLS):
        call()
    bench.call("glm_cuda_graph_end", ctypes.byref(graph))
    return graph


def _time(bench: CudaBench, graph: ctypes.c_void_p) -> float:
    elapsed = ctypes.c_float()
    bench.call("glm_cuda_graph_time", graph, ctypes.c_int(REPLAYS), ctypes.byref(elapsed))
    return elapsed.value * 1e3 / REPLAYS


def shape_of(size: int) -> tuple[int, int]:
    """Rows and columns of bf16."""
    cols = min(size // 2, 4096)
    return size // 2 // cols, cols


@dataclass
class Sum:
    bytes: int
    microseconds: dict[str, float]


def sum_of(buffers: Sequence[int], size: int) -> Call:
    rows, cols = shape_of(size)

    def call(bench: CudaBench, rank: int) -> None:
        bench.run(Op.ALL_REDUCE, abi.AllReduceArgs(rows, tensor(buffers[rank], Dtype.BF16, cols)))

    return call


def nccl_sum_of(nccl: Nccl, buffers: Sequence[int], size: int) -> Call:
    def call(bench: CudaBench, rank: int) -> None:
        nccl.all_reduce_bf16(rank, buffers[rank], size // 2, bench.library.glm_cuda_stream(bench.handle))

    return call


def measure_sums(ranks: Ranks, nccl: Nccl | None, sizes: Sequence[int]) -> Iterator[Sum]:
    buffers = ranks.each(lambda bench, _: bench.fill(np.zeros(1 << 20, np.uint8), max(sizes)))
    for size in sizes:
        times = {}
        for name in PATHS if size <= MESSAGE_BYTES else ["by size"]:
            with ranks.path(name):
                times[name] = ranks.microseconds(sum_of(buffers, size))
        if nccl is not None:
            times["NCCL"] = ranks.microseconds(nccl_sum_of(nccl, buffers, size))
        yield Sum(size, times)


def norm_args(bench: CudaBench, rows: int, *, reduce: bool) -> abi.RmsNormArgs:
    x, delta = (bench.fill(np.zeros(1 << 20, np.uint8), rows * HIDDEN * 2) for _ in range(2))
    weight, q = bench.put(np.ones(HIDDEN, np.float32)), bench.alloc(rows * HIDDEN)
    act, absent = tensor(x, Dtype.BF16, HIDDEN), tensor(None, Dtype.F32, 0)
    scale = tensor(bench.alloc(rows * 4), Dtype.F32, 1)
    added, quantized = tensor(delta, Dtype.BF16, HIDDEN), tensor(q, Dtype.FP8_E4M3, HIDDEN)
    return abi.RmsNormArgs(rows, act, added, weight, 1e-5, absent, quantized, scale, reduce)


@dataclass
class Exchange:
    name: str
    rows: int
    microseconds: float


def run_op(op: Op, args: Sequence[ctypes.Structure]) -> Call:
    """Each rank with arguments of its own."""

    def call(bench: CudaBench, rank: int) -> None:
        bench.run(op, args[rank])

    return call


def measure_norms(ranks: Ranks) -> Iterator[Exchange]:
    for rows in (1, 16, 64, 128, 256):
        for name, reduce in (("add, norm, quantise", False), ("all-reduce, add, norm, quantise", True)):
            args = [norm_args(bench, rows, reduce=reduce) for bench in ranks.benches]
            yield Exchange(name, rows, ranks.microseconds(run_op(Op.RMS_NORM, args)))


def sample_args(bench: CudaBench, rank: int, num_ranks: int, rows: int, asked: abi.Sampling) -> abi.SampleArgs:
    """Of a rank's part of the vocabulary, peaked as a model's logits are."""
    first, end = (VOCAB // 4 * part // num_ranks * 4 for part in (rank, rank + 1))
    rng = np.random.default_rng(rank)
    logits = bench.put((3 * rng.standard_normal((rows, end - first))).astype(np.float32))
    rows_of = [bench.put(np.arange(rows, dtype=np.int32)) for _ in range(4)]
    outputs = [bench.alloc(rows * 4 * abi.MAX_LOGPROBS) for _ in range(4)]
    nothing = [bench.put(np.full(rows, -1, np.int32)) for _ in range(2)]  # masked, forced
    step = abi.StepInputs(rows, rows, rows, *rows_of[:3], *rows_of[:2], *rows_of[2:4], *outputs, *nothing)
    sampling = (abi.Sampling * rows)(*[asked] * rows)
    slots = abi.Slots(
        bench.put(np.frombuffer(bytes(sampling), np.uint8)),
        bench.alloc(rows * 4),
        bench.alloc(rows * 4),
        bench.put(np.zeros((rows, VOCAB), np.uint16)),
        rows,
        1,
        VOCAB,
    )
    args = abi.SampleArgs(
        rows, ctypes.pointer(step), ctypes.pointer(slots), tensor(logits, Dtype.F32, end - first), first
    )
    bench.reserve(Op.SAMPLE, args)
    return args


def measure_samples(ranks: Ranks) -> Iterator[Exchange]:
    kinds = {
        "greedy": request(temperature=0.0),
        "top-p 0.95": request(top_p=0.95),
        "top-k 40": request(top_k=40),
        "top-k 40, top-p 0.95": request(top_k=40, top_p=0.95),
    }
    for name, asked in kinds.items():
        args = [sample_args(bench, rank, len(ranks.benches), 64, asked) for rank, bench in enumerate(ranks.benches)]
        us = ranks.microseconds(run_op(Op.SAMPLE, args))
        yield Exchange(f"sample {VOCAB}, {name}", 64, us)


def print_sum(found: Sum) -> None:
    columns = "".join(f"  {name} {us:8.1f} us" for name, us in found.microseconds.items())
    print(f"{found.bytes / 1024:9.0f} KB{columns}", flush=True)


def begin(description: str | None) -> tuple[argparse.Namespace, Ranks, Nccl | None, dict[str, object]]:
    """The command line's options, what it asks for, and what a record of the run begins with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks, nccl = Ranks(options.ranks), load_nccl(options.ranks)
    device = ranks.benches[0].kernels.device_description(ranks.benches[0].handle).decode()
    print(f"{options.ranks} ranks, each {device}; {nccl.version if nccl else 'no NCCL'}")
    record = {"device": device, "ranks": options.ranks, "nccl": nccl.version if nccl else None}
    return options, ranks, nccl, record


def main() -> None:
    options, ranks, nccl, record = begin(__doc__)
    exchanges = [*measure_norms(ranks), *measure_samples(ranks)]
    for exchange in exchanges:
        print(f"{exchange.name:40s} {exchange.rows:4d} rows {exchange.microseconds:8.1f} us", flush=True)
    sums = []
    for found in measure_sums(ranks, nccl, [1 << n for n in range(10, 27)]):
        print_sum(found)
        sums.append(found)
    if options.json:
        found_all = {"sums": [asdict(one) for one in sums], "exchanges": [asdict(one) for one in exchanges]}
        options.json.write_text(json.dumps({**record, **found_all}, indent=1) + "\n")


if __name__ == "__main__":
    main()
