"""NCCL by ctypes: what our own sums over GPUs are measured against."""

from __future__ import annotations

import ctypes
import os

_BF16, _SUM = 9, 0  # ncclBfloat16, ncclSum
_BF16_BYTES = 2


class Nccl:
    """A communicator for each of the first GPUs of this process."""

    def __init__(self, library: ctypes.CDLL, num_ranks: int) -> None:
        self._library = library
        self._communicators = (ctypes.c_void_p * num_ranks)()
        self._check(library.ncclCommInitAll(self._communicators, num_ranks, None))
        number = ctypes.c_int()
        self._check(library.ncclGetVersion(ctypes.byref(number)))
        self.version = f"NCCL {number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def _check(self, result: int) -> None:
        if result != 0:
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NCCL: {self._library.ncclGetErrorString(result).decode()}")

    def all_reduce_bf16(self, rank: int, address: int, count: int, stream: int) -> None:
        """In place, in the stream."""
        data = ctypes.c_void_p(address)
        self._check(self._library.ncclAllReduce(data, data, *_of(count), _SUM, *self._in(rank, stream)))

    def reduce_scatter_bf16(self, rank: int, address: int, count: int, stream: int) -> None:
        """Of `count` elements on every rank, its part stays where it is."""
        data, own, part = ctypes.c_void_p(address), self._own(rank, address, count), self._part(count)
        self._check(self._library.ncclReduceScatter(data, own, *part, _SUM, *self._in(rank, stream)))

    def all_gather_bf16(self, rank: int, address: int, count: int, stream: int) -> None:
        """`count` elements, of which each rank has its part in its place."""
        data, own, part = ctypes.c_void_p(address), self._own(rank, address, count), self._part(count)
        self._check(self._library.ncclAllGather(own, data, *part, *self._in(rank, stream)))

    def _part(self, count: int) -> tuple[ctypes.c_size_t, int]:
        return _of(count // len(self._communicators))

    def _own(self, rank: int, address: int, count: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(address + rank * (count // len(self._communicators)) * _BF16_BYTES)

    def _in(self, rank: int, stream: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return ctypes.c_void_p(self._communicators[rank]), ctypes.c_void_p(stream)


def _of(count: int) -> tuple[ctypes.c_size_t, int]:
    return ctypes.c_size_t(count), _BF16


def load_nccl(num_ranks: int) -> Nccl | None:
    """None if this machine has no libnccl.so.2, and GLM_NCCL names none."""
    try:
        library = ctypes.CDLL(os.environ.get("GLM_NCCL", "libnccl.so.2"))
    except OSError:
        return None
    return Nccl(library, num_ranks)
