"""Where a table's memory is: on the host, or on a GPU that the table reaches."""

import ctypes
from collections import defaultdict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tests.kernels import abi

Bytes = npt.NDArray[np.uint8]


class Memory(Protocol):
    def place(self, image: Bytes) -> int:
        """Address of a copy of the image (or of the image itself)."""

    def fetch(self, address: int, image: Bytes) -> None:
        """Bring the image up to date with what lies at the address."""

    def release(self, address: int, size: int) -> None:
        """Nothing will use the address any more."""

    def wait(self) -> None:
        """Until the device's operations have run."""


class HostMemory:
    def place(self, image: Bytes) -> int:
        return image.ctypes.data

    def fetch(self, address: int, image: Bytes) -> None:
        pass

    def release(self, address: int, size: int) -> None:
        pass

    def wait(self) -> None:
        pass


class DeviceMemory:
    """Blocks of the memory of a table's device, kept for reuse by size: allocating on a GPU waits for it.

    With `chunk` bytes, blocks are parts of allocations of that size: OpenCL has a layer's experts in one of them.
    """

    def __init__(self, kernels: abi.Kernels, device: ctypes.c_void_p, chunk: int = 0) -> None:
        self._kernels, self._device, self._chunk = kernels, device, chunk
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._part, self._rest = 0, 0  # what is left of the newest chunk

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._kernels, name)(self._device, *arguments)
        if status != abi.Status.OK:
            raise RuntimeError(f"{name}: {self._kernels.last_error(self._device).decode()}")

    @staticmethod
    def _block_size(size: int) -> int:
        return max(256, 1 << (size - 1).bit_length())

    def place(self, image: Bytes) -> int:
        free = self._free[self._block_size(image.size)]
        address = free.pop() if free else self._take(self._block_size(image.size))
        source, size = ctypes.c_void_p(image.ctypes.data), ctypes.c_size_t(image.size)
        self._call("copy_in", ctypes.c_void_p(address), source, size)
        self.wait()
        return address

    def _take(self, size: int) -> int:
        if size > self._chunk:
            return self._allocate(size)
        if size > self._rest:
            self._part, self._rest = self._allocate(self._chunk), self._chunk
        address, self._part, self._rest = self._part, self._part + size, self._rest - size
        return address

    def _allocate(self, size: int) -> int:
        block = ctypes.c_void_p()
        self._call("memory_alloc", ctypes.c_size_t(size), ctypes.byref(block))
        assert block.value is not None
        return block.value

    def fetch(self, address: int, image: Bytes) -> None:
        to, size = ctypes.c_void_p(image.ctypes.data), ctypes.c_size_t(image.size)
        self._call("copy_out", to, ctypes.c_void_p(address), size)
        self.wait()

    def release(self, address: int, size: int) -> None:
        self._free[self._block_size(size)].append(address)

    def wait(self) -> None:
        self._call("synchronize")
