"""Drives the CUDA table by ctypes for benchmarks: device arrays, captured graphs, times per operation."""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_worker.runtime.abi import kernel_table_path
from tests.kernels import abi

Array = npt.NDArray[Any]


class CudaBench:
    """One device. Memory lives as long as the process."""

    def __init__(self, ordinal: int = 0) -> None:
        path = os.environ.get("GLM_KERNELS_CUDA") or kernel_table_path("cuda")
        self.library = ctypes.CDLL(str(path))
        self.library.glm_kernels_query.restype = ctypes.POINTER(abi.Kernels)
        self.library.glm_cuda_last_error.restype = ctypes.c_char_p
        self.library.glm_cuda_stream.restype = ctypes.c_void_p
        self.kernels = self.library.glm_kernels_query(abi.VERSION).contents
        self.handle = ctypes.c_void_p()
        error = ctypes.create_string_buffer(512)
        options = abi.DeviceOptions(ordinal, 0)
        if self.kernels.device_open(options, ctypes.byref(self.handle), error, len(error)) != abi.Status.OK:
            raise SystemExit(error.value.decode())
        self._workspace = 0

    def check(self, status: int, what: str) -> None:
        if status != abi.Status.OK:
            raise RuntimeError(f"{what}: {self.library.glm_cuda_last_error(self.handle).decode()}")

    def call(self, name: str, *arguments: Any) -> None:
        self.check(getattr(self.library, name)(self.handle, *arguments), name)

    def alloc(self, size: int) -> int:
        out = ctypes.c_void_p()
        self.call("glm_cuda_memory_alloc", ctypes.c_size_t(max(size, 16)), ctypes.byref(out))
        return int(out.value or 0)

    def put(self, array: Array) -> int:
        """Address of a copy of the array."""
        source = np.ascontiguousarray(array)
        address = self.alloc(source.nbytes)
        size = ctypes.c_size_t(source.nbytes)
        self.call("glm_cuda_copy_in", ctypes.c_void_p(address), ctypes.c_void_p(source.ctypes.data), size)
        self.call("glm_cuda_synchronize")
        return address

    def fill(self, pattern: Array, size: int) -> int:
        """Address of `size` bytes that repeat the pattern."""
        source = np.ascontiguousarray(pattern).reshape(-1).view(np.uint8)[:size]
        address = self.alloc(size)
        self.call(
            "glm_cuda_copy_in",
            ctypes.c_void_p(address),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(source.nbytes),
        )
        done = source.nbytes
        while done < size:
            part = min(done, size - done)
            self.call("glm_cuda_copy", ctypes.c_void_p(address + done), ctypes.c_void_p(address), ctypes.c_size_t(part))
            done += part
        self.call("glm_cuda_synchronize")
        return address

    def run(self, op: abi.Op, args: ctypes.Structure) -> None:
        self.check(getattr(self.kernels, op.name.lower())(self.handle, ctypes.byref(args)), op.name)

    def reserve(self, op: abi.Op, args: ctypes.Structure) -> None:
        """A workspace that holds what this operation needs."""
        size = self.kernels.workspace_bytes(self.handle, op, ctypes.byref(args))
        if size > self._workspace:
            self._workspace = size
            self.kernels.set_workspace(self.handle, self.alloc(size), size)

    def microseconds(self, calls: Sequence[Callable[[], None]], replays: int = 20, repeats: int = 5) -> float:
        """Best time of one of the calls, captured together as one graph and replayed."""
        for call in calls[:1]:
            call()
        self.call("glm_cuda_synchronize")
        graph = ctypes.c_void_p()
        self.call("glm_cuda_graph_begin")
        for call in calls:
            call()
        self.call("glm_cuda_graph_end", ctypes.byref(graph))
        elapsed = ctypes.c_float()
        times = []
        for _ in range(repeats):
            self.call("glm_cuda_graph_time", graph, ctypes.c_int(replays), ctypes.byref(elapsed))
            times.append(elapsed.value * 1e3 / replays / len(calls))
        self.call("glm_cuda_graph_free", graph)
        return min(times)


def tensor(address: int | None, dtype: abi.Dtype, cols: int) -> abi.Tensor:
    return abi.Tensor(address, dtype, cols, cols)
