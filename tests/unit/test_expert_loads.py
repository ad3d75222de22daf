"""Readings of the experts' loads: what is told of them, and the file that is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from engine_worker.expert_loads import Counts, ExpertLoadReader, ExpertLoads, watch_expert_loads
from engine_worker.models import Model, Parallelism, build_model
from engine_worker.models.placement import ExpertPlacement
from glmserve.engine.v1 import engine_pb2
from tests.unit.checkpoint_files import tiny_config, tiny_tensors, write_checkpoint
from tests.unit.telemetry_harness import recorded
from tests.unit.worker_harness import running_worker


class CountingEngine:
    """Each rank's newest counters, [layers][places of the rank]."""

    def __init__(self, *ranks: list[list[int]]) -> None:
        self.ranks = [np.array(rank, np.uint64) for rank in ranks]

    def expert_loads(self, rank: int, count: int) -> Counts:
        assert count == self.ranks[rank].size
        return self.ranks[rank].reshape(-1).copy()


def model(directory: Path, parallelism: Parallelism) -> Model:
    """Layers 1 and 2 have 4 experts."""
    config = tiny_config(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    write_checkpoint(directory, config, tiny_tensors(config, "BF16"))
    return build_model(directory, "auto", parallelism)


def test_places_are_told_as_experts(tmp_path: Path) -> None:
    placement = ExpertPlacement({2: ((3, 1), (0, 2))})
    engine = CountingEngine([[1, 2], [5, 6]], [[3, 4], [7, 8]])
    loads = ExpertLoadReader(engine, model(tmp_path, Parallelism(2, 2, placement=placement))).read()
    assert loads.layers == (1, 2)
    assert loads.experts.tolist() == [[1, 2, 3, 4], [7, 6, 8, 5]]
    assert loads.groups.tolist() == [[3, 7], [11, 15]]
    assert json.loads(loads.text()) == {"version": 1, "layers": {"1": [1, 2, 3, 4], "2": [7, 6, 8, 5]}}


def test_imbalance_is_of_what_came_since_the_reading_before(tmp_path: Path) -> None:
    engine = CountingEngine([[8, 0], [1, 1]], [[0, 0], [1, 1]])
    reader = ExpertLoadReader(engine, model(tmp_path, Parallelism(2, 2)))
    first = reader.read()
    assert (first.recent_experts, first.recent_groups) == ([4.0, 1.0], [2.0, 1.0])
    assert reader.read().recent_experts == [4.0, 1.0], "nothing came: what was recent still is"
    engine.ranks[0] += np.array([[2, 2], [0, 0]], np.uint64)
    engine.ranks[1] += np.array([[2, 2], [0, 4]], np.uint64)
    assert reader.read().recent_experts == [1.0, 4.0]


async def test_readings_are_told_and_kept_to_the_end(tmp_path: Path) -> None:
    engine = CountingEngine([[1, 0, 0, 0], [0, 0, 0, 1]])
    told: asyncio.Queue[ExpertLoads] = asyncio.Queue()
    path = tmp_path / "loads.json"
    reader = ExpertLoadReader(engine, model(tmp_path, Parallelism()))
    watch = asyncio.create_task(watch_expert_loads(reader, told.put_nowait, path, interval_s=0.001))
    assert (await told.get()).experts[0].tolist() == [1, 0, 0, 0]
    engine.ranks[0] = engine.ranks[0] + np.uint64(1)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    assert json.loads(path.read_text())["layers"] == {"1": [2, 1, 1, 1], "2": [1, 1, 1, 2]}
    assert not path.with_name(".loads.json.new").exists()


async def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    told: asyncio.Queue[ExpertLoads] = asyncio.Queue()
    reader = ExpertLoadReader(CountingEngine([[1, 0, 0, 0], [0, 0, 0, 1]]), model(tmp_path, Parallelism()))
    gone = tmp_path / "removed" / "loads.json"
    watch = asyncio.create_task(watch_expert_loads(reader, told.put_nowait, gone, interval_s=0.001))
    with capture_logs() as logs:
        for _ in range(3):
            await told.get()
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch
    assert {(line["event"], line["path"]) for line in logs} == {("expert_loads_not_kept", str(gone))}


async def test_the_load_and_the_metrics_have_the_newest_reading() -> None:
    counts = np.array([[30, 10], [20, 20]], np.uint64)
    loads = ExpertLoads((3, 4), counts, counts, recent_experts=[1.5, 1.0], recent_groups=[1.25, 1.0])
    with recorded() as seen:
        async with running_worker(telemetry=seen.telemetry) as worker:
            assert (await worker.load()).expert_imbalance == 0
            assert seen.value("glm_worker_expert_imbalance", layer="3", among="experts") is None
            worker.service.take_expert_loads(loads)
            load: engine_pb2.Load = await worker.load()
            assert (load.expert_imbalance, load.expert_rank_imbalance) == pytest.approx((1.25, 1.125))
            assert seen.value("glm_worker_expert_imbalance", layer="3", among="experts") == 1.5
            assert seen.value("glm_worker_expert_imbalance", layer="3", among="ranks") == 1.25
            assert seen.value("glm_worker_expert_group_tokens_total", group="0") == 50
            assert "glm_worker_expert_tokens_total" not in seen.names()
