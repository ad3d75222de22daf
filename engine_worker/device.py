"""Which kernel table, on which device, the worker runs on."""

from __future__ import annotations

from typing import Literal, NamedTuple

from engine_worker.errors import UnsupportedError, WorkerError
from engine_worker.runtime.abi import Library, kernel_table_path

DeviceSetting = Literal["auto", "cpu", "cuda"]


class DeviceChoice(NamedTuple):
    table: Literal["cpu", "cuda"]
    reason: str


def choose_device(setting: DeviceSetting, gpu: int) -> DeviceChoice:
    """What `setting` means on this machine; auto: GPU `gpu` if it answers, else the CPU.

    Raises UnsupportedError, DeviceError or InvalidRequestError if cuda is asked for and cannot be had, naming the
    library, driver, GPU or architecture that is missing.
    """
    if setting == "cpu":
        return DeviceChoice("cpu", "asked for")
    try:
        _probe_cuda(gpu)
    except WorkerError as error:
        if setting == "cuda":
            raise
        return DeviceChoice("cpu", str(error))
    return DeviceChoice("cuda", "asked for" if setting == "cuda" else f"GPU {gpu} answers")


def _probe_cuda(gpu: int) -> None:
    path = kernel_table_path("cuda")
    if not path.exists():
        raise UnsupportedError(f"kernel table {path} is missing: build it with `make cuda`")
    Library().probe(path, gpu)
