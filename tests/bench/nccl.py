"""NCCL by ctypes: what our own sums over GPUs are measured against."""

from __future__ import annotations

import ctypes
import os

_BF16, _SUM = 9, 0  # ncclBfloat16, ncclSum


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
        communicator = ctypes.c_void_p(self._communicators[rank])
        size = ctypes.c_size_t(count)
        self._check(self._library.ncclAllReduce(data, data, size, _BF16, _SUM, communicator, ctypes.c_void_p(stream)))


def load_nccl(num_ranks: int) -> Nccl | None:
    """None if this machine has no libnccl.so.2, and GLM_NCCL names none."""
    try:
        library = ctypes.CDLL(os.environ.get("GLM_NCCL", "libnccl.so.2"))
    except OSError:
        return None
    return Nccl(library, num_ranks)
