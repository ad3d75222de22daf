"""Fixtures of the runtime's tests: the fault table, and an engine that runs the tiny plan on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import TensorSource
from tests.native import tiny
from tests.native.fault_table import FaultTable


@pytest.fixture(scope="session")
def loaded_table() -> FaultTable:
    return FaultTable()


@pytest.fixture
def faults(loaded_table: FaultTable) -> Iterator[FaultTable]:
    """The fault table with nothing set; afterwards every device must have been closed."""
    loaded_table.reset()
    yield loaded_table
    assert loaded_table.open_devices() == 0


@pytest.fixture
def tensors(tmp_path: Path) -> list[TensorSource]:
    return tiny.write_shard(tmp_path / "model.safetensors", {"table": tiny.table_tensor()})


@pytest.fixture
def engine(faults: FaultTable, tensors: list[TensorSource]) -> Iterator[Engine]:
    with Engine.create(tiny.options(faults.path, tensors)) as made:
        yield made
