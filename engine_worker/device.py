"""Which kernel table, on which device, the worker runs on."""

from __future__ import annotations

from typing import Literal, NamedTuple

from engine_worker.errors import UnsupportedError, WorkerError
from engine_worker.runtime.abi import Library, kernel_table_path

DeviceSetting = Literal["auto", "cpu", "cuda"]
KernelsSetting = Literal["native", "futhark"]

# Of each setting, the tables of the CPU and of the GPU, and what builds each.
_TABLES = {"native": {"cpu": "cpu", "cuda": "cuda"}, "futhark": {"cpu": "futhark", "cuda": "futhark_cuda"}}
_REMEDIES = {
    "cuda": "make cuda",
    "futhark": "make futhark",
    "futhark_cuda": "make futhark FUTHARK_BACKEND=cuda",
}


class DeviceChoice(NamedTuple):
    table: str
    reason: str


def on_gpu(table: str) -> bool:
    """Whether each rank of the table has a GPU to itself, and memory that is not the host's."""
    return table in ("cuda", "futhark_cuda")


def choose_device(setting: DeviceSetting, gpu: int, kernels: KernelsSetting = "native") -> DeviceChoice:
    """What `setting` means on this machine with these kernels; auto: GPU `gpu` if it answers, else the CPU.

    Raises UnsupportedError, DeviceError or InvalidRequestError if what is asked for cannot be had, naming the library,
    driver, GPU or architecture that is missing.
    """
    tables = _TABLES[kernels]
    if setting == "cpu":
        return DeviceChoice(_built(tables["cpu"]), "asked for")
    try:
        Library().probe(kernel_table_path(_built(tables["cuda"])), gpu)
    except WorkerError as error:
        if setting == "cuda":
            raise
        return DeviceChoice(_built(tables["cpu"]), str(error))
    return DeviceChoice(tables["cuda"], "asked for" if setting == "cuda" else f"GPU {gpu} answers")


def _built(table: str) -> str:
    path = kernel_table_path(table)
    if table != "cpu" and not path.exists():
        raise UnsupportedError(f"kernel table {path} is missing: build it with `{_REMEDIES[table]}`")
    return table
