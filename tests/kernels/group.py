"""Devices of one table as the ranks of a group, each driven by a thread of its own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

from tests.kernels import abi
from tests.kernels.harness import Device, Table, use_memory

# Ranks that share a GPU: a kernel that is loaded at its first launch waits for all that runs there, another rank's
# kernel too, which may wait for this one. Read when CUDA starts.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

Result = TypeVar("Result")


class Group:
    def __init__(self, table: Table, devices: Sequence[Device]) -> None:
        self.devices = devices
        self._table = table
        self._handle = ctypes.c_void_p()
        handles = (ctypes.c_void_p * len(devices))(*(device.handle for device in devices))
        error = ctypes.create_string_buffer(512)
        create = table.kernels.group_create
        status = create(handles, len(devices), ctypes.byref(self._handle), error, len(error))
        assert status == abi.Status.OK, error.value.decode()

    def each(self, call: Callable[[int, Device], Result]) -> list[Result]:
        """call(rank, device) on all ranks at once, buffers on the rank's device; the results in order of rank."""

        def run(rank: int, device: Device) -> Result:
            use_memory(device.memory)
            return call(rank, device)

        with ThreadPoolExecutor(len(self.devices)) as threads:
            return list(threads.map(run, range(len(self.devices)), self.devices))

    def abort(self) -> None:
        self._table.kernels.group_abort(self._handle)

    def destroy(self) -> None:
        self._table.kernels.group_destroy(self._handle)


RANKS_PER_GPU = 2  # whose kernels surely run at the same time


@cache
def count_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


@contextmanager
def open_group(
    table: Table, num_ranks: int, num_threads: int = 1, ranks_per_gpu: int = RANKS_PER_GPU
) -> Iterator[Group]:
    """On GPUs: each rank on one of its own, or, if they are too few, up to ranks_per_gpu on each."""
    if not table.kernels.group_create:
        pytest.skip(f"the table {table.name} has no groups")
    gpus = count_gpus() if table.name == "cuda" else 1
    if table.name == "cuda" and num_ranks > ranks_per_gpu * gpus:
        pytest.skip(f"{num_ranks} ranks need {-(-num_ranks // ranks_per_gpu)} GPUs, this machine has {gpus}")
    devices = [table.open(num_threads, rank % gpus) for rank in range(num_ranks)]
    group = Group(table, devices)
    yield group
    group.destroy()
    for device in devices:
        device.close()
