"""What experts were given is counted on the device: each token once, by the expert it went to, padding never."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_worker.errors import InvalidRequestError
from engine_worker.expert_loads import ExpertLoadReader
from engine_worker.models import Model, Parallelism, build_model
from engine_worker.models.placement import ExpertPlacement
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions
from tests.golden.cases import CASES
from tests.native.device_table import DeviceTable
from tests.native.tiny import batch, bind, step

CASE = next(case for case in CASES if case.name == "f32_8_kv_heads")
TOKENS = [int(token) for token in np.load(CASE.directory / "expected.npz")["token_ids"][:11]]
REVERSED = ExpertPlacement({1: ((7, 5, 3, 1), (6, 4, 2, 0))})


def create(model: Model, kernels: Path) -> Engine:
    options = EngineOptions(
        kernels_path=kernels,
        ranks=rank_options(model),
        tensors=model.tensors,
        max_rows=32,
        max_samples=6,
        max_slots=6,
        max_context=64,
        num_pages=12,
        num_threads=1,
    )
    return Engine.create(options)


def run(engine: Engine) -> None:
    """A prompt, then five sequences that decode: on a device with graphs they fill a step of eight."""
    slots = range(1, 6)
    bind(engine, 0, *slots)
    step(engine, batch((0, 0, TOKENS), updates=[(0, 0, 0)]))
    step(engine, batch(*[(s, 0, [TOKENS[s]]) for s in slots], updates=[(s, 0, s) for s in slots], decode=True))


def counted(parallelism: Parallelism, kernels: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Of experts and of groups, [layers][...]."""
    model = build_model(CASE.directory, "auto", parallelism)
    with create(model, kernels) as engine:
        reader = ExpertLoadReader(engine, model)
        assert not reader.read().experts.any(), "counted before the first step"
        run(engine)
        loads = reader.read()
    return loads.experts.tolist(), loads.groups.tolist()


def test_every_token_counts_once_for_each_of_its_experts() -> None:
    config = build_model(CASE.directory).config
    experts, groups = counted(Parallelism(), kernel_table_path("cpu"))
    assigned = (len(TOKENS) + 5) * config.num_experts_per_tok
    assert [sum(layer) for layer in experts] == [assigned] * len(experts)
    assert groups == [[assigned]] * len(experts)
    assert len(experts[0]) == config.n_routed_experts


def test_padding_of_graphs_does_not_count() -> None:
    table = DeviceTable()
    table.reset()
    assert counted(Parallelism(), table.path) == counted(Parallelism(), kernel_table_path("cpu"))


@pytest.mark.parametrize(
    "parallelism",
    [Parallelism(2, 1), Parallelism(2, 2), Parallelism(4, 2), Parallelism(4, 2, placement=REVERSED)],
    ids=["tp2", "ep2", "tp4_ep2", "placed"],
)
def test_ranks_count_their_own_experts(parallelism: Parallelism) -> None:
    one, _ = counted(Parallelism(), kernel_table_path("cpu"))
    experts, groups = counted(parallelism, kernel_table_path("cpu"))
    assert experts == one
    if parallelism.placement is not None:
        odd = sum(one[0][expert] for expert in (1, 3, 5, 7))
        assert groups[0] == [odd, sum(one[0]) - odd]


def test_room_of_another_size_is_refused() -> None:
    model = build_model(CASE.directory)
    with create(model, kernel_table_path("cpu")) as engine:
        with pytest.raises(InvalidRequestError, match="expert loads: room for 3, expected"):
            engine.expert_loads(0, 3)
        with pytest.raises(InvalidRequestError, match="rank 1, expected 0 to 0"):
            engine.expert_loads(1, 3)
