"""Profiles: each op of a step is timed, on tables with graphs and without, and nothing but buffers is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_worker.errors import InvalidRequestError
from engine_worker.models import Model, build_model
from engine_worker.plan.cost import OpCost
from engine_worker.profile.ops import profile_ops
from engine_worker.profile.shape import StepShape, options_for
from engine_worker.profile.steps import time_steps
from engine_worker.runtime.abi import Engine
from tests.native import tiny
from tests.native.device_table import DeviceTable
from tests.native.test_synthetic import config_directory

DECODE = StepShape(3, 50)
PREFILL = StepShape(2, 40, 24, decode=False)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return build_model(config_directory(tmp_path, num_hidden_layers=3), synthetic_seed=0)


@pytest.fixture(params=["cpu", "device with graphs"])
def engine(request: pytest.FixtureRequest, model: Model) -> Iterator[Engine]:
    options = options_for(model, "cpu", [DECODE, PREFILL], num_threads=1)
    if request.param != "cpu":
        options = replace(options, kernels_path=DeviceTable().path)
    with Engine.create(options) as made:
        yield made


def a_microsecond(cost: OpCost) -> float:
    return 1e-6


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("recorded", [False, True])
def test_every_op_is_timed(engine: Engine, model: Model, shape: StepShape, recorded: bool) -> None:
    plan = shape.plan(model)
    ops = profile_ops(engine, plan, shape, a_microsecond, recorded=recorded, repeats=2)
    assert sum(op.cost.calls for op in ops) == len(plan.ops)
    assert [op.cost.label for op in ops][:3] == ["embed", "layers.*.attn.norm", "layers.*.attn.qkv"]
    assert all(op.seconds > 0 and op.ratio == op.seconds / 1e-6 for op in ops)


def test_every_label(engine: Engine, model: Model) -> None:
    ops = profile_ops(engine, model.decode, DECODE, a_microsecond, every_label=True, repeats=1)
    assert [op.cost.label for op in ops] == [op.label for op in model.decode.ops]


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_steps_of_a_shape(engine: Engine, model: Model, shape: StepShape) -> None:
    before = engine.info().steps_run
    times = time_steps(engine, shape, 3)
    assert engine.info().steps_run == before + 5
    assert 0 < times.fastest_s <= times.device_s
    assert times.gap_s >= 0


def run(engine: Engine, ops: Sequence[int], repeats: int = 1) -> None:
    engine.release_slot(0)
    tiny.bind(engine, 0)
    engine.run_ops(tiny.batch((0, 0, [1]), updates=[(0, 0, 0)], decode=True), ops, repeats)


def test_ops_add_up_to_a_step(engine: Engine, model: Model) -> None:
    batch = tiny.batch((0, 0, [5]), updates=[(0, 0, 0)], decode=True)
    tiny.bind(engine, 0)
    expected = tiny.step(engine, batch)
    result = engine.run_ops(batch, range(len(model.decode.ops)))
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)


def test_a_buffer_can_be_set(engine: Engine) -> None:
    values = np.arange(2 * 128, dtype=np.uint16).reshape(2, 128)
    engine.write_buffer("delta", values)
    np.testing.assert_array_equal(engine.read_buffer("delta", (2, 128), np.uint16), values)
    with pytest.raises(InvalidRequestError, match="buffer delta: 254 bytes, expected 256: 1 rows of 128 bf16"):
        engine.write_buffer("delta", values[:1, :127])


def test_wrong_ops_are_refused(engine: Engine, model: Model) -> None:
    with pytest.raises(InvalidRequestError, match=f"op {len(model.decode.ops)}, expected 0 to"):
        run(engine, [len(model.decode.ops)])
    with pytest.raises(InvalidRequestError, match="op -1, expected 0 to"):
        run(engine, [-1])
    with pytest.raises(InvalidRequestError, match="repeats 0, expected at least 1"):
        run(engine, [0], repeats=0)
    run(engine, [])


def test_ops_are_not_run_beside_a_step(engine: Engine) -> None:
    tiny.bind(engine, 0)
    batch = tiny.batch((0, 0, [5]), updates=[(0, 0, 0)], decode=True)
    engine.submit(batch)
    with pytest.raises(InvalidRequestError, match="the engine is not idle"):
        engine.run_ops(batch, [0])
    engine.collect()
