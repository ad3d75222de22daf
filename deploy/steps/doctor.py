"""What of glmserve can run here: each part that is built or found, and how to get those that are not."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.models.catalog import DEFAULT_MODEL
from deploy.models.store import MANIFEST, cache_root

CUDA_TABLE = "kernel table cuda"
# In what is found of a table that does not run.
UNUSABLE = "not usable here"


@dataclass(frozen=True)
class Finding:
    """`found` is what is there, None if nothing; `remedy` then says what to do. `required`: nothing runs without."""

    part: str
    found: str | None
    remedy: str = ""
    required: bool = False


def examine(gpu: int = 0) -> list[Finding]:
    """All parts, in the order in which they build on each other."""
    return [
        Finding("python", ".".join(map(str, sys.version_info[:3])), required=True),
        _runtime(),
        _table("cpu", "", lambda path: None, required=True),
        _table("cuda", "GPUs need it: `make cuda`", lambda path: _probe(path, gpu)),
        _table("futhark", "the portable kernels need it: `make futhark`", lambda path: None),
        *(
            _table(f"futhark_{backend}", f"`make futhark FUTHARK_BACKEND={backend}`", lambda path: _probe(path, gpu))
            for backend in ("cuda", "hip", "opencl")
        ),
        _shared_object("CUDA driver", "libcuda.so.1", "install the GPU's driver, 580 or newer"),
        _shared_object("NCCL", "libnccl.so.2", "several GPUs need it: install libnccl2, or nvidia-nccl-cu13 with pip"),
        _tool("nvcc", "`make cuda` uses NVIDIA's packages instead"),
        _terra(),
        _tool("futhark", "`make toolchains`, or set GLM_TOOLCHAINS"),
        _model(),
    ]


def missing(findings: list[Finding]) -> Iterator[Finding]:
    """Those without which nothing runs."""
    return (finding for finding in findings if finding.required and finding.found is None)


def _runtime() -> Finding:
    from engine_worker.errors import WorkerError  # noqa: PLC0415 - slow to import
    from engine_worker.runtime.abi import LIBRARY_DIR, Library  # noqa: PLC0415

    try:
        Library()
    except WorkerError as error:
        return Finding("native runtime", None, str(error), required=True)
    return Finding("native runtime", str(LIBRARY_DIR), required=True)


def _table(name: str, remedy: str, probe: Callable[[Path], str | None], *, required: bool = False) -> Finding:
    from engine_worker.runtime.abi import kernel_table_path  # noqa: PLC0415

    path, part = kernel_table_path(name), f"kernel table {name}"
    if not path.exists():
        return Finding(part, None, remedy or "run `make build`", required)
    return Finding(part, f"{path.name}{_added(probe(path))}", required=required)


def _added(note: str | None) -> str:
    return f"; {note}" if note else ""


def _probe(path: Path, gpu: int) -> str:
    """Whether the table runs on the GPU."""
    from engine_worker.errors import WorkerError  # noqa: PLC0415
    from engine_worker.runtime.abi import Library  # noqa: PLC0415

    try:
        Library().probe(path, gpu)
    except WorkerError as error:
        return f"{UNUSABLE}: {error}"
    return f"GPU {gpu} answers"


def _shared_object(part: str, name: str, remedy: str) -> Finding:
    try:
        ctypes.CDLL(name)
    except OSError:
        return Finding(part, None, remedy)
    return Finding(part, name)


def _tool(name: str, remedy: str) -> Finding:
    from engine_worker.driver.toolchain import find_compiler  # noqa: PLC0415

    path = find_compiler(name)
    return Finding(name, str(path)) if path else Finding(name, None, remedy)


def _terra() -> Finding:
    from engine_worker.driver.toolchain import LINKER_REMEDY, TERRA_REMEDY, find_compiler, find_linker  # noqa: PLC0415

    path = find_compiler("terra")
    if path is None:
        return Finding("terra", None, f"executor terra needs it: {TERRA_REMEDY}")
    if find_linker() is None:
        return Finding("terra", None, f"{path} needs a C compiler to link with: {LINKER_REMEDY}")
    return Finding("terra", str(path))


def _model() -> Finding:
    directory = cache_root() / "models" / DEFAULT_MODEL
    there = (directory / MANIFEST).is_file()
    return Finding("embedded model", str(directory) if there else None, "`glm model fetch`; the first start does it")
