"""Which kernel table a setting gives, and what is said where it cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from engine_worker import device as device_module
from engine_worker.device import choose_device
from engine_worker.errors import UnsupportedError, WorkerError


class Prober:
    """Stands in for the native library: the GPU answers, or not."""

    error: WorkerError | None = None
    asked: ClassVar[list[tuple[Path, int]]] = []

    def probe(self, path: Path, ordinal: int) -> None:
        self.asked.append((path, ordinal))
        if self.error is not None:
            raise self.error


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "libglm_kernels_cuda.so"
    path.touch()
    return path


@pytest.fixture
def prober(monkeypatch: pytest.MonkeyPatch, table: Path) -> type[Prober]:
    monkeypatch.setattr(device_module, "kernel_table_path", lambda name: table.with_name(f"libglm_kernels_{name}.so"))
    monkeypatch.setattr(device_module, "Library", Prober)
    monkeypatch.setattr(Prober, "error", None)
    monkeypatch.setattr(Prober, "asked", [])
    return Prober


def test_cpu_asks_no_gpu(prober: type[Prober]) -> None:
    assert choose_device("cpu", 0) == ("cpu", "asked for")
    assert prober.asked == []


def test_a_gpu_that_answers_is_taken(prober: type[Prober]) -> None:
    assert choose_device("auto", 1) == ("cuda", "GPU 1 answers")
    assert choose_device("cuda", 1) == ("cuda", "asked for")
    assert [(path.name, gpu) for path, gpu in prober.asked] == [("libglm_kernels_cuda.so", 1)] * 2


def test_a_gpu_that_does_not_answer(prober: type[Prober], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "error", UnsupportedError("no usable CUDA driver or GPU"))
    assert choose_device("auto", 0) == ("cpu", "no usable CUDA driver or GPU")
    with pytest.raises(UnsupportedError, match="no usable CUDA driver or GPU"):
        choose_device("cuda", 0)


def test_futhark_has_a_table_of_each_device(prober: type[Prober], table: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"libglm_kernels_futhark.so is missing: build it with `make futhark`"):
        choose_device("cpu", 0, "futhark")
    with pytest.raises(UnsupportedError, match=r"futhark_cuda.so is missing: build it with `make futhark FUTHARK_BACK"):
        choose_device("cuda", 0, "futhark")
    table.with_name("libglm_kernels_futhark.so").touch()
    assert choose_device("cpu", 0, "futhark").table == "futhark"
    assert choose_device("auto", 0, "futhark").table == "futhark"
    table.with_name("libglm_kernels_futhark_cuda.so").touch()
    assert choose_device("auto", 1, "futhark") == ("futhark_cuda", "GPU 1 answers")
    assert [(path.name, gpu) for path, gpu in prober.asked] == [("libglm_kernels_futhark_cuda.so", 1)]


def test_futhark_takes_the_first_gpu_table_that_answers(prober: type[Prober], table: Path) -> None:
    for name in ("futhark", "futhark_opencl"):
        table.with_name(f"libglm_kernels_{name}.so").touch()
    assert choose_device("auto", 0, "futhark") == ("futhark_opencl", "GPU 0 answers")
    with pytest.raises(UnsupportedError, match=r"futhark_cuda.so is missing"):
        choose_device("cuda", 0, "futhark")
    table.with_name("libglm_kernels_futhark_hip.so").touch()
    assert choose_device("auto", 0, "futhark").table == "futhark_hip"
    assert [path.name.removeprefix("libglm_kernels_") for path, _ in prober.asked] == [
        "futhark_opencl.so",
        "futhark_hip.so",
    ]


def test_futhark_on_the_cpu_says_why_no_gpu_answers(
    prober: type[Prober], table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("futhark", "futhark_hip", "futhark_opencl"):
        table.with_name(f"libglm_kernels_{name}.so").touch()
    monkeypatch.setattr(prober, "error", UnsupportedError("no device"))
    assert choose_device("auto", 0, "futhark") == ("futhark", "no device; no device")


@pytest.mark.usefixtures("prober")
def test_a_missing_table(table: Path) -> None:
    table.unlink()
    assert choose_device("auto", 0).table == "cpu"
    with pytest.raises(UnsupportedError, match=r"libglm_kernels_cuda.so is missing: build it with `make cuda`"):
        choose_device("cuda", 0)
