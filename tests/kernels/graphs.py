"""Calls that a kernel table records once and replays."""

import ctypes
from collections.abc import Sequence

from tests.kernels import abi
from tests.kernels.harness import Device


def has_graphs(device: Device) -> bool:
    return bool(device.table.kernels.graph_begin)


def record(device: Device, calls: Sequence[tuple[abi.Op, ctypes.Structure]]) -> ctypes.c_void_p:
    """A graph of the calls, to be freed by graph_free."""
    graph = ctypes.c_void_p()
    assert device.table.kernels.graph_begin(device.handle) == abi.Status.OK
    for op, args in calls:
        assert device.call(op, args) == abi.Status.OK
    assert device.table.kernels.graph_end(device.handle, ctypes.byref(graph)) == abi.Status.OK
    return graph
