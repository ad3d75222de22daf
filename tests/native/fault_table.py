"""Controls of the kernel table in fault_table.cpp."""

from __future__ import annotations

import ctypes
import enum
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = Path(os.environ.get("GLM_LIBRARY_DIR") or ROOT / "build" / "native" / "lib") / "libglm_fault_table.so"


class Op(enum.IntEnum):
    EMBED = 0
    RMS_NORM = 1
    QUANTIZE = 2
    LINEAR = 3
    ALL_REDUCE = 11
    SAMPLE = 13


class FaultTable:
    """The table's counters and switches; all of them are process-wide."""

    def __init__(self) -> None:
        if not PATH.exists():
            raise FileNotFoundError(f"{PATH} is missing: run `make build`")
        self._dll = ctypes.CDLL(str(PATH))
        self._dll.glm_fault_workspace.restype = ctypes.c_size_t
        self.path = PATH

    def reset(self) -> None:
        self._dll.glm_fault_reset()

    def fail(self, op: Op, status: int, after_calls: int = 0) -> None:
        self._dll.glm_fault_fail(int(op), after_calls, status)

    def on_rank(self, rank: int) -> None:
        """Failures and hangs are this rank's only."""
        self._dll.glm_fault_on_rank(rank)

    def hang(self, op: Op, after_calls: int = 0) -> None:
        """A call of `op` does not return until `reset`."""
        self._dll.glm_fault_hang(int(op), after_calls)

    def wait_hanging(self, calls: int) -> None:
        """Until so many calls hang."""
        self._dll.glm_fault_wait_hanging(calls)

    def set_begun(self, rank: int, exchanges: int) -> None:
        """Devices run behind the calls: this rank's has begun so many exchanges."""
        self._dll.glm_fault_set_begun(rank, ctypes.c_uint64(exchanges))

    def remove_groups(self) -> None:
        self._dll.glm_fault_remove_groups()

    def fail_open(self, status: int) -> None:
        self._dll.glm_fault_fail_open(status)

    def speak(self, version: int) -> None:
        self._dll.glm_fault_speak(version)

    def want_workspace(self, size: int) -> None:
        self._dll.glm_fault_want_workspace(ctypes.c_size_t(size))

    def remove_norms(self) -> None:
        self._dll.glm_fault_remove_norms()

    def calls(self, op: Op) -> int:
        return int(self._dll.glm_fault_calls(int(op)))

    def rows(self, op: Op) -> int:
        return int(self._dll.glm_fault_rows(int(op)))

    def workspace(self) -> int:
        return int(self._dll.glm_fault_workspace())

    def open_devices(self) -> int:
        return int(self._dll.glm_fault_open_devices())
