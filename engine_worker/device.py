"""Which kernel table, on which device, the worker runs on."""

from __future__ import annotations

from typing import Literal, NamedTuple

from engine_worker.errors import UnsupportedError, WorkerError
from engine_worker.runtime.abi import Library, kernel_table_path

DeviceSetting = Literal["auto", "cpu", "cuda"]
KernelsSetting = Literal["native", "futhark"]

# Of each setting, the table of the CPU and those of GPUs, CUDA's first: `auto` tries them in this order.
_ON_CPU = {"native": "cpu", "futhark": "futhark"}
_ON_GPU = {"native": ("cuda",), "futhark": ("futhark_cuda", "futhark_hip", "futhark_opencl")}
_REMEDIES = {
    "cuda": "make cuda",
    "futhark": "make futhark",
    "futhark_cuda": "make futhark FUTHARK_BACKEND=cuda",
    "futhark_hip": "make futhark FUTHARK_BACKEND=hip",
    "futhark_opencl": "make futhark FUTHARK_BACKEND=opencl",
}


class DeviceChoice(NamedTuple):
    table: str
    reason: str


def on_gpu(table: str) -> bool:
    """Whether each rank of the table has a GPU to itself, and memory that is not the host's."""
    return any(table in tables for tables in _ON_GPU.values())


def choose_device(setting: DeviceSetting, gpu: int, kernels: KernelsSetting = "native") -> DeviceChoice:
    """What `setting` means on this machine with these kernels; auto: GPU `gpu` if it answers, else the CPU.

    Of several tables for GPUs, auto takes the first that is built and that a GPU answers.
    Raises UnsupportedError, DeviceError or InvalidRequestError if what is asked for cannot be had, naming the library,
    driver, GPU or architecture that is missing.
    """
    if setting == "cpu":
        return DeviceChoice(_built(_ON_CPU[kernels]), "asked for")
    tables = _ON_GPU[kernels]
    if setting == "cuda":
        _probe(tables[0], gpu)
        return DeviceChoice(tables[0], "asked for")
    errors = []
    for table in [table for table in tables if kernel_table_path(table).exists()] or tables[:1]:
        try:
            _probe(table, gpu)
        except WorkerError as error:
            errors.append(str(error))
        else:
            return DeviceChoice(table, f"GPU {gpu} answers")
    return DeviceChoice(_built(_ON_CPU[kernels]), "; ".join(errors))


def _probe(table: str, gpu: int) -> None:
    Library().probe(kernel_table_path(_built(table)), gpu)


def _built(table: str) -> str:
    path = kernel_table_path(table)
    if table != "cpu" and not path.exists():
        raise UnsupportedError(f"kernel table {path} is missing: build it with `{_REMEDIES[table]}`")
    return table
