"""Fixtures: every table the suite holds to the contract, a device of it, and the activation dtypes."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.kernels.device_memory import HostMemory
from tests.kernels.harness import BF16, F32, Device, Table, use_memory
from tests.kernels.isa import TABLE_VARIANTS, load_variant

NEEDS = {
    "cuda": "a GPU and `make cuda`",
    "futhark": "`make futhark`",
    "futhark_cuda": "a GPU and `make futhark FUTHARK_BACKEND=cuda`",
    "futhark_hip": "a GPU and `make futhark FUTHARK_BACKEND=hip`",
    "futhark_opencl": "`make futhark FUTHARK_BACKEND=opencl`",
}
VARIANTS = [pytest.param(name, marks=[pytest.mark.gpu] if name.endswith("cuda") else []) for name in TABLE_VARIANTS]


@pytest.fixture(scope="session", params=VARIANTS)
def table(request: pytest.FixtureRequest) -> Table:
    loaded = load_variant(request.param)
    if loaded is None:
        pytest.skip(
            f"this machine cannot run {request.param}: it needs {NEEDS.get(request.param, 'the instruction set')}"
        )
    return loaded


@pytest.fixture(scope="session")
def device(table: Table) -> Iterator[Device]:
    opened = table.open(num_threads=2)
    use_memory(opened.memory)
    yield opened
    use_memory(HostMemory())
    opened.close()


@pytest.fixture(scope="session")
def other_device(table: Table, device: Device) -> Iterator[Device]:
    """The same table with another number of threads: results must not depend on it.

    With OpenCL the same device: memory is one context's, and threads are the driver's.
    """
    if table.name == "futhark_opencl":
        yield device
        return
    opened = table.open(num_threads=3)
    yield opened
    opened.close()


@pytest.fixture(params=[F32, BF16], ids=["f32", "bf16"])
def act(request: pytest.FixtureRequest) -> "np.dtype[np.generic]":
    dtype: np.dtype[np.generic] = request.param
    return dtype


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2024)
