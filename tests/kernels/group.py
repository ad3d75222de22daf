"""Devices of one table as the ranks of a group, each driven by a thread of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

from tests.kernels import abi
from tests.kernels.harness import Device, Table

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
        """call(rank, device) on all ranks at once; the results in order of rank."""
        with ThreadPoolExecutor(len(self.devices)) as threads:
            return list(threads.map(call, range(len(self.devices)), self.devices))

    def abort(self) -> None:
        self._table.kernels.group_abort(self._handle)

    def destroy(self) -> None:
        self._table.kernels.group_destroy(self._handle)


@contextmanager
def open_group(table: Table, num_ranks: int, num_threads: int = 1) -> Iterator[Group]:
    if not table.kernels.group_create:
        pytest.skip(f"the table {table.name} has no groups")
    devices = [table.open(num_threads) for _ in range(num_ranks)]
    group = Group(table, devices)
    yield group
    group.destroy()
    for device in devices:
        device.close()
