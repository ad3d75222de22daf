"""Operations by themselves, `futhark bench` beside the table in C++: `python -m tests.bench.futhark_ops`.

One line an operation and number of rows: the fastest run of each in microseconds, two threads. The call through ctypes,
some microseconds, is in the time of C++. kernels/futhark/bench/ops.fut has Futhark's side, compiled with
the flags of `make futhark`. Needs `make build`, and futhark on PATH or under GLM_TOOLCHAINS.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.cuda_bench import tensor
from tests.kernels import abi
from tests.kernels.abi import Dtype, Op, WeightFormat
from tests.kernels.harness import ROOT, Device, load_table

FUTHARK = ROOT / "kernels" / "futhark"
FLAGS = "-O3 -std=c11 -march=native -ffp-contract=off -fwrapv -fno-math-errno -fno-trapping-math"
HIDDEN, INNER, VOCAB = 576, 1536, 49152
THREADS, LEAST_S = 2, 0.5

rng = np.random.default_rng(7)


def futhark_us() -> dict[tuple[str, int], float]:
    """By operation and rows, the fastest of the runs that `futhark bench` makes."""
    where = Path(os.environ.get("GLM_TOOLCHAINS") or ROOT / "build" / "toolchains") / "bin"
    compiler = shutil.which("futhark", path=os.pathsep.join((str(where), os.environ["PATH"])))
    if compiler is None:
        raise SystemExit("no futhark on PATH or under GLM_TOOLCHAINS: `make toolchains`")
    with tempfile.TemporaryDirectory() as directory:  # `futhark bench` leaves what it compiles beside the program
        copied, out = Path(directory, "futhark"), Path(directory, "out.json")
        shutil.copytree(FUTHARK, copied)
        command = [compiler, "bench", "--backend=multicore", f"--futhark={compiler}", f"--json={out}"]
        options = [f"--pass-option=--num-threads={THREADS}", str(copied / "bench" / "ops.fut")]
        subprocess.run([*command, *options], check=True, env={**os.environ, "LC_ALL": "C.UTF-8", "CFLAGS": FLAGS})
        found = json.loads(out.read_text())
    return {
        (program.rpartition(":")[2], int(rows)): float(min(measured["runtimes"]))
        for program, timed in found.items()
        for rows, measured in timed["datasets"].items()
    }


class Table:
    """The CPU table; arrays live as long as it does."""

    def __init__(self) -> None:
        self.device: Device = load_table("cpu").open(THREADS)
        self.arrays: list[npt.NDArray[Any]] = []

    def put(self, array: npt.NDArray[Any]) -> int:
        self.arrays.append(array)
        return array.ctypes.data

    def fp8(self, rows: int, cols: int) -> int:
        return self.put(rng.integers(16, 96, (rows, cols), np.uint8) | rng.integers(0, 2, (rows, cols), np.uint8) << 7)

    def bf16(self, rows: int, cols: int) -> int:
        return self.put((rng.random((rows, cols), np.float32).view(np.uint32) >> 16).astype(np.uint16))

    def f32(self, rows: int, cols: int) -> int:
        return self.put(np.full((rows, cols), 0.01, np.float32))

    def linear(self, rows: int, fp8: bool) -> tuple[Op, ctypes.Structure]:
        n, form = (INNER, WeightFormat.FP8_CHANNEL) if fp8 else (VOCAB, WeightFormat.BF16)
        x = tensor(self.fp8(rows, HIDDEN), Dtype.FP8_E4M3, HIDDEN) if fp8 else self.act(rows)
        args = abi.LinearArgs(rows, 1, form, x, tensor(self.f32(rows, 1), Dtype.F32, 1) if fp8 else abi.Tensor())
        weights = self.fp8(n, HIDDEN) if fp8 else self.bf16(n, HIDDEN)
        args.parts[0] = abi.Weight(weights, HIDDEN, self.f32(n, 1) if fp8 else None, 0, n)
        args.out = tensor(self.f32(rows, n), Dtype.BF16 if fp8 else Dtype.F32, n)
        return Op.LINEAR, args

    def act(self, rows: int) -> abi.Tensor:
        return tensor(self.bf16(rows, HIDDEN), Dtype.BF16, HIDDEN)

    def rms_norm(self, rows: int) -> tuple[Op, ctypes.Structure]:
        none, codes = (
            abi.Tensor(None, Dtype.BF16, HIDDEN, HIDDEN),
            tensor(self.fp8(rows, HIDDEN), Dtype.FP8_E4M3, HIDDEN),
        )
        scale = tensor(self.f32(rows, 1), Dtype.F32, 1)
        weight = self.f32(1, HIDDEN)
        return Op.RMS_NORM, abi.RmsNormArgs(rows, self.act(rows), self.act(rows), weight, 1e-5, none, codes, scale)

    def operation(self, name: str, rows: int) -> tuple[Op, ctypes.Structure]:
        return self.rms_norm(rows) if name == "rms_norm" else self.linear(rows, name == "linear_fp8_channel")

    def us(self, name: str, rows: int) -> float:
        """The fastest run of half a second."""
        op, args = self.operation(name, rows)
        self.device.run(op, args)
        fastest, end = float("inf"), time.perf_counter() + LEAST_S
        while (begin := time.perf_counter()) < end:
            assert self.device.status_of(op, args) == abi.Status.OK
            fastest = min(fastest, time.perf_counter() - begin)
        return fastest * 1e6


def lines() -> Iterator[str]:
    timed, table = futhark_us(), Table()
    for (name, rows), futhark in sorted(timed.items()):
        native = table.us(name, rows)
        yield f"{name:20} {rows:4} {native:12.1f} {futhark:12.1f} {futhark / native:8.2f}"


def main() -> None:
    print(f"{'operation':20} {'rows':>4} {'C++ us':>12} {'Futhark us':>12} {'ratio':>8}")
    for line in lines():
        print(line, flush=True)


if __name__ == "__main__":
    main()
