"""Controls of the kernel table in device_table.cpp."""

from __future__ import annotations

import ctypes

from engine_worker.runtime.abi import kernel_table_path
from tests.native.fault_table import PATH as FAULT_TABLE_PATH

PATH = FAULT_TABLE_PATH.with_name("libglm_device_table.so")


class DeviceTable:
    """The table's counters and switches; all of them are process-wide."""

    def __init__(self) -> None:
        if not PATH.exists():
            raise FileNotFoundError(f"{PATH} is missing: run `make build`")
        self._dll = ctypes.CDLL(str(PATH))
        cpu = kernel_table_path("cpu")
        if not self._dll.glm_device_table_set_up(str(cpu).encode()):
            raise FileNotFoundError(f"{cpu} cannot be loaded: run `make build`")
        self._dll.glm_device_table_last_range.restype = ctypes.c_char_p
        self.path = PATH

    def reset(self) -> None:
        self.limit(0)
        self.fail(-1)

    def limit(self, size: int) -> None:
        """Bytes of the next device's memory; 0: all there is."""
        self._dll.glm_device_table_limit(ctypes.c_size_t(size))

    def fail(self, after_ops: int) -> None:
        """The op that the stream comes to after so many more fails; -1: none."""
        self._dll.glm_device_table_fail(after_ops)

    @property
    def graph_launches(self) -> int:
        return int(self._dll.glm_device_table_graph_launches())

    @property
    def ops_enqueued(self) -> int:
        """Ops called, those that were recorded included."""
        return int(self._dll.glm_device_table_ops_enqueued())

    @property
    def ops_run(self) -> int:
        return int(self._dll.glm_device_table_ops_run())

    @property
    def ranges(self) -> int:
        """Ranges of ops that have ended."""
        return int(self._dll.glm_device_table_ranges())

    @property
    def last_range(self) -> str:
        """The label of the last range, while its engine lives."""
        label: bytes = self._dll.glm_device_table_last_range()
        return label.decode()

    @property
    def copies_in(self) -> int:
        return int(self._dll.glm_device_table_copies_in())

    @property
    def slow_copies(self) -> int:
        """Copies from or to memory that is not the table's own host memory."""
        return int(self._dll.glm_device_table_slow_copies())
