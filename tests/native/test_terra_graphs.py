"""Decode graphs recorded from a compiled driver, on the device whose stream runs late (device_table.cpp)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_worker.driver.compile import ExecutorSetting, with_executor
from engine_worker.errors import DeviceError
from engine_worker.models import Model
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import RankOptions
from tests.golden import session
from tests.golden.session import Logits, open_session
from tests.golden.test_parallel import BY_NAME, tokens_of
from tests.native.device_table import DeviceTable
from tests.terra_toolchain import drivers_kept_in, needs_terra

pytestmark = needs_terra


@pytest.fixture
def device(tmp_path: Path) -> Iterator[DeviceTable]:
    table = DeviceTable()
    table.reset()
    with drivers_kept_in(tmp_path):
        yield table
    table.reset()


def use(monkeypatch: pytest.MonkeyPatch, executor: ExecutorSetting) -> None:
    def driven(model: Model, first_gpu: int | None = None) -> list[RankOptions]:
        return with_executor(rank_options(model, first_gpu), executor)

    monkeypatch.setattr(session, "rank_options", driven)


@pytest.mark.parametrize("name", ["f32_8_kv_heads", "fp8_channel_bf16"])
def test_replayed_steps_are_those_of_the_built_in_executor(
    monkeypatch: pytest.MonkeyPatch, device: DeviceTable, name: str
) -> None:
    tokens, found = tokens_of(name), dict[str, list[Logits]]()
    executors: list[ExecutorSetting] = ["native", "terra", "terra-debug"]
    for executor in executors:
        use(monkeypatch, executor)
        with open_session(BY_NAME[name].directory, kernels=device.path) as opened:
            before = device.graph_launches
            found[executor] = [opened.decode(tokens), opened.prefill(tokens, [17, 15, 17])]
            assert device.graph_launches > before
    for executor in executors:
        for one, other in zip(found[executor], found["native"], strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_device_that_fails_behind_the_calls_is_told_alike(
    monkeypatch: pytest.MonkeyPatch, device: DeviceTable
) -> None:
    name, told = "f32_8_kv_heads", []
    executors: list[ExecutorSetting] = ["native", "terra"]
    for executor in executors:
        use(monkeypatch, executor)
        device.reset()
        with open_session(BY_NAME[name].directory, kernels=device.path) as opened:
            device.fail(3)
            with pytest.raises(DeviceError) as caught:
                opened.prefill(tokens_of(name))
            told.append(str(caught.value))
    assert told[0] == told[1]
