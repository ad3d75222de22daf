"""Two GPUs of which one hangs or fails in mid-step: `python -m tests.golden.gpu_faults hang|fail [EXCHANGE]`.

Prints what the engine tells, and after how long. A process of its own: a GPU that failed stays failed in it.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from engine_worker.errors import WorkerError
from engine_worker.models import build_model
from engine_worker.models.exchange import Exchange, Exchanges
from engine_worker.models.layout import Parallelism
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.watchdog import wait_until_stalled
from tests.golden.cases import DATA
from tests.golden.mixed_requests import Run, engine_options, make_requests
from tests.kernels import abi
from tests.kernels.harness import Device, Table

STALL_S = 2.0
HANG_S = 30.0
STEPS_BEFORE = 50


def open_gpu(ordinal: int) -> Device:
    library = ctypes.CDLL(str(kernel_table_path("cuda")))
    library.glm_kernels_query.restype = ctypes.POINTER(abi.Kernels)
    return Device(Table("cuda", library.glm_kernels_query(abi.VERSION).contents, library), 0, ordinal)


def hang(gpu: Device) -> None:
    gpu.table.library.glm_cuda_occupy(gpu.handle, ctypes.c_uint64(int(HANG_S * 1e9)))


def fail(gpu: Device) -> None:
    gpu.table.library.glm_cuda_fault(gpu.handle)


def run(fault: Callable[[Device], None], exchange: Exchange) -> None:
    exchanges = Exchanges(exchange, exchange)
    model = build_model(DATA / "f32_8_kv_heads", "auto", Parallelism(2, 2), exchanges=exchanges)
    gpu = open_gpu(1)
    with Engine.create(engine_options(model)) as engine:
        work = Run(engine, make_requests(100_000, model.config.vocab_size))
        begin = 0.0

        def break_it() -> None:
            nonlocal begin
            while work.steps < STEPS_BEFORE:
                time.sleep(0.001)
            begin = time.monotonic()
            fault(gpu)

        def watch() -> None:
            error = asyncio.run(wait_until_stalled(engine.progress, STALL_S))
            engine.abort(str(error))

        threading.Thread(target=break_it, daemon=True).start()
        threading.Thread(target=watch, daemon=True).start()
        try:
            work.go()
        except WorkerError as error:
            print(f"after {time.monotonic() - begin:.2f} s, step {work.steps}: {error}", flush=True)
            np.testing.assert_array_less(STEPS_BEFORE, work.steps)
            sys.stdout.flush()
            # Closing would wait for the GPU; the worker ends its process too.
            ctypes.CDLL(None)._exit(0)


if __name__ == "__main__":
    chosen: Exchange = "all_to_all" if "all_to_all" in sys.argv[2:] else "replicate"
    run({"hang": hang, "fail": fail}[sys.argv[1]], chosen)
