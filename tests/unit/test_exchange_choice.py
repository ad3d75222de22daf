"""Which exchange the plans use: as set, or the faster one in steps that are measured before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_worker import exchange_choice
from engine_worker.config import WorkerConfig
from engine_worker.errors import ConfigError, UnsupportedError
from engine_worker.exchange_choice import choose_exchanges
from engine_worker.models import Parallelism, build_model
from engine_worker.models.exchange import Exchange, Exchanges
from engine_worker.profile.shape import StepShape
from engine_worker.profile.steps import StepTime
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import EngineOptions
from tests.native.test_synthetic import config_directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return config_directory(tmp_path, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)


def settings(directory: Path, **values: Any) -> WorkerConfig:
    return WorkerConfig(**{"model": directory, "tp": 2, "max_running": 4, "step_tokens": 16, "threads": 2, **values})


def auto(directory: Path, **values: Any) -> WorkerConfig:
    return settings(directory, expert_exchange_prefill="auto", expert_exchange_decode="auto", **values)


def test_what_is_set_is_not_measured(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_choice, "_measure", None)
    assert choose_exchanges(settings(directory), "cpu") == Exchanges()
    chosen = settings(directory, expert_exchange_decode="all_to_all")
    assert choose_exchanges(chosen, "cpu") == Exchanges("replicate", "all_to_all")


@pytest.mark.parametrize(("faster", "other"), [("replicate", "all_to_all"), ("all_to_all", "replicate")])
def test_the_faster_one_is_chosen_for_each_plan(
    directory: Path, monkeypatch: pytest.MonkeyPatch, faster: Exchange, other: Exchange
) -> None:
    """Steps run for real; their times are made up: decode is faster with `faster`, prefill with the other one."""
    engines: list[bool] = []

    def timed(engine: Engine, shape: StepShape, steps: int) -> StepTime:
        exchanged = len(engines) == 2
        quick = (exchanged == (faster == "all_to_all")) == shape.decode
        return StepTime(0, 0, 1.0 if quick else 2.0, steps)

    def create(options: EngineOptions) -> Engine:
        engines.append("all_gather" in options.ranks[0].mixed_plan)
        return Engine.create(options)

    monkeypatch.setattr(exchange_choice, "time_steps", timed)
    monkeypatch.setattr(exchange_choice, "Engine", type("Made", (), {"create": staticmethod(create)}))
    assert choose_exchanges(auto(directory), "cpu") == Exchanges(other, faster)
    assert engines == [False, True]


def test_steps_are_measured(directory: Path) -> None:
    chosen = choose_exchanges(auto(directory), "cpu")
    assert {chosen.mixed, chosen.decode} <= {"replicate", "all_to_all"}


def test_a_table_without_the_exchange_replicates(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(options: EngineOptions) -> Engine:
        if "all_gather" in options.ranks[0].mixed_plan:
            raise UnsupportedError("kernel table x lacks ops that the plans need: all_gather (3 calls)")
        return Engine.create(options)

    monkeypatch.setattr(exchange_choice, "Engine", type("Made", (), {"create": staticmethod(create)}))
    assert choose_exchanges(auto(directory), "cpu") == Exchanges()


@pytest.mark.parametrize("values", [{"tp": 1}, {"tp": 2, "ep": 1}, {"tp": 2, "rank_slice": 1}])
def test_layouts_without_a_choice_replicate(directory: Path, values: dict[str, Any]) -> None:
    assert choose_exchanges(auto(directory, **values), "cpu") == Exchanges()


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        (Parallelism(2, 1), "all_to_all, but with tp=2 ep=1 experts are cut; set ep to tp, or replicate"),
        (Parallelism(2, 2, rank_slice=0), "a rank slice has nobody to exchange tokens with"),
    ],
)
def test_layouts_that_cannot_exchange_are_refused(directory: Path, parallelism: Parallelism, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(directory, "auto", parallelism, 0, Exchanges("replicate", "all_to_all"))


def test_exchanges_have_revisions_of_their_own(directory: Path) -> None:
    settings = [Exchanges(), Exchanges("all_to_all"), Exchanges(decode="all_to_all")]
    models = [build_model(directory, "auto", Parallelism(2, 2), 0, exchanges) for exchanges in settings]
    assert len({model.revision for model in models}) == 3
