"""An engine of several ranks on a kernel table that fails and hangs on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from engine_worker.errors import DeviceError, InternalError, InvalidRequestError, UnsupportedError
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import EngineOptions, RankOptions, TensorSource
from tests.native import tiny
from tests.native.fault_table import FaultTable, Op
from tests.native.tiny import HIDDEN, batch, bind, step

GLM_DEVICE_ERROR, GLM_INTERNAL = 5, 6
SHARDS = [(0, 36), (36, 68), (68, 100)]  # of the vocabulary


def plan(name: str, shard: tuple[int, int]) -> str:
    """The tiny plan of one of several ranks."""
    first, end = shard
    ops = ["op embed embed table=table out=x", "op linear part x=x w=part out=y", "op all_reduce reduce x=x"]
    return tiny.plan(
        name,
        f"buffer y f32 T {HIDDEN}",
        f"matrix part f32 {HIDDEN} {HIDDEN}",
        f"part tensor=table rows={first}:{first + HIDDEN} cols=0:{HIDDEN}",
        f"buffer logits f32 S {end - first}",
        *ops,
        f"op sample sample logits=logits first={first}",
        drop=[*tiny.OPS, tiny.QUANTIZE, f"buffer logits f32 S {tiny.VOCAB}"],
    )


def rank_options(shard: tuple[int, int], old: str = "", new: str = "") -> RankOptions:
    """Of one rank, with `old` replaced by `new` in both plans."""
    mixed, decode = (plan(name, shard).replace(old, new) for name in ("mixed", "decode"))
    return RankOptions(mixed, decode)


def ranks(shards: Sequence[tuple[int, int]] = SHARDS) -> list[RankOptions]:
    return [rank_options(shard) for shard in shards]


def options(faults: FaultTable, tensors: list[TensorSource], **changes: Any) -> EngineOptions:
    return tiny.options(faults.path, tensors, **{"ranks": ranks(), **changes})


@pytest.fixture
def engine(faults: FaultTable, tensors: list[TensorSource]) -> Iterator[Engine]:
    with Engine.create(options(faults, tensors)) as made:
        yield made
        faults.reset()  # nothing hangs any more


def test_every_rank_takes_every_step(engine: Engine, faults: FaultTable) -> None:
    bind(engine, 0)
    for position, token in enumerate([5, 9, 2]):
        result = step(engine, batch((0, position, [token]), updates=[(0, 0, 4)]))
        assert result.token_ids.tolist() == [position + 1]
        assert result.top_ids[0, 0] == 4  # the page table
        for rank in range(3):
            assert (engine.read_buffer("x", (1, HIDDEN), np.float32, rank) == token).all()
    assert faults.calls(Op.ALL_REDUCE) == faults.calls(Op.SAMPLE) == 9
    assert engine.info().steps_run == 3


def test_info_adds_up_ranks(engine: Engine, faults: FaultTable, tensors: list[TensorSource]) -> None:
    many = engine.info()
    alone = rank_options((0, 100), "op all_reduce reduce x=x\n")
    with Engine.create(options(faults, tensors, ranks=[alone])) as one:
        assert many.kv_bytes == 3 * one.info().kv_bytes
        assert many.device == "3 ranks, each test device" and one.info().device == "test device"


def test_buffers_of_ranks_that_are_not_there(engine: Engine) -> None:
    for rank in (-1, 3):
        with pytest.raises(InvalidRequestError, match=f"rank {rank}, expected 0 to 2"):
            engine.read_buffer("x", (1, HIDDEN), np.float32, rank)


def test_ops_one_by_one_need_a_slice(engine: Engine) -> None:
    bind(engine, 0)
    with pytest.raises(UnsupportedError, match="an engine of 1 rank, this one has 3: use a rank slice"):
        engine.run_ops(batch((0, 0, [1]), updates=[(0, 0, 0)]), [0])


@pytest.mark.parametrize("op", [Op.LINEAR, Op.ALL_REDUCE, Op.SAMPLE])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("status", "error"), [(GLM_DEVICE_ERROR, DeviceError), (GLM_INTERNAL, InternalError)])
def test_a_rank_that_fails_ends_all(
    engine: Engine, faults: FaultTable, op: Op, rank: int, status: int, error: type[Exception]
) -> None:
    bind(engine, 0)
    step(engine, batch((0, 0, [1]), updates=[(0, 0, 0)]))
    faults.on_rank(rank)
    faults.fail(op, status)
    label = {Op.LINEAR: "linear part", Op.ALL_REDUCE: "all_reduce reduce", Op.SAMPLE: "sample sample"}[op]
    message = f"^rank {rank}: op {label} of kernel table fault returned GLM_.* in step 1$"
    engine.submit(batch((0, 1, [1])))
    for call in (engine.collect, engine.info, lambda: engine.release_slot(0), lambda: bind(engine, 1)):
        with pytest.raises(error, match=message):
            call()


def test_a_rank_that_hangs_is_named_and_given_up(engine: Engine, faults: FaultTable) -> None:
    bind(engine, 0)
    faults.on_rank(1)
    faults.hang(Op.LINEAR)
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 0)]))
    with ThreadPoolExecutor(1) as threads:
        collected = threads.submit(engine.collect)
        faults.wait_hanging(1)
        while faults.calls(Op.ALL_REDUCE) < 2:
            pass  # the other two ranks come to wait
        standstill = engine.progress()
        assert standstill.where == (
            "rank 1 in op linear part of step 0; "
            "rank 0 in op all_reduce reduce of step 0, rank 2 in op all_reduce reduce of step 0"
        )
        assert engine.progress() == standstill
        engine.abort(f"no op has ended: {standstill.where}")
        with pytest.raises(DeviceError, match="^no op has ended: rank 1 in op linear part of step 0;"):
            collected.result()
    with pytest.raises(DeviceError, match="no op has ended"):
        engine.info()


def test_a_device_that_hangs_is_named(engine: Engine, faults: FaultTable) -> None:
    """The host has handed over all of the steps; what the devices have begun says where they are."""
    exchanges = ["all_reduce reduce", "sample sample"]
    for rank in range(3):
        faults.set_begun(rank, 0)
    bind(engine, 0)
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 0)]))
    engine.submit(batch((0, 1, [1])))
    while faults.calls(Op.SAMPLE) < 3 * 2 or "in op" in engine.progress().where:
        pass
    places = [f"op {name} of step {number}" for number in range(2) for name in exchanges]
    for begun, place in enumerate(places):
        faults.set_begun(1, begun)
        faults.set_begun(0, begun + 1)
        faults.set_begun(2, begun + 1)
        behind = f"past {places[begun - 1]}" if begun else f"before {place}"
        assert engine.progress().where == f"rank 1 {behind}; rank 0 in {place}, rank 2 in {place}"
    engine.collect()
    engine.collect()
    assert engine.progress().where == ""


def test_a_failure_tells_where_the_devices_are(engine: Engine, faults: FaultTable) -> None:
    bind(engine, 0)
    for rank, begun in enumerate((1, 0, 1)):
        faults.set_begun(rank, begun)
    faults.on_rank(1)
    faults.fail(Op.ALL_REDUCE, GLM_DEVICE_ERROR)
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 0)]))
    with pytest.raises(DeviceError, match=r"^rank 1: op all_reduce .* in step 0 \(.*rank 1 in op all_reduce reduce"):
        engine.collect()


def test_progress_counts_the_ops_of_all_ranks(engine: Engine) -> None:
    bind(engine, 0)
    before = engine.progress()
    assert before.where == ""
    step(engine, batch((0, 0, [1]), updates=[(0, 0, 0)]))
    assert engine.progress().calls == before.calls + 3 * 4


def test_a_table_without_groups_has_one_rank(faults: FaultTable, tensors: list[TensorSource]) -> None:
    faults.remove_groups()
    with pytest.raises(UnsupportedError, match="kernel table fault runs one rank only, expected 1, got 3"):
        Engine.create(options(faults, tensors))


def test_ranks_must_agree(faults: FaultTable, tensors: list[TensorSource]) -> None:
    def refused(made: list[RankOptions], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            Engine.create(options(faults, tensors, ranks=made))

    refused([], "num_ranks 0, expected 1 to 64")
    refused(ranks()[:1], "op all_reduce reduce: an engine of one rank has nobody to exchange data with")
    refused(ranks()[:2], "mixed plans: the ranks sample 68 tokens together, expected vocab 100")
    refused([ranks()[i] for i in (0, 2, 1)], "mixed plan of rank 1: samples tokens from 68, expected from 36")
    twice = rank_options(SHARDS[1], "op all_reduce reduce", "op all_reduce first x=x\nop all_reduce reduce")
    refused([ranks()[0], twice, ranks()[2]], "mixed plan of rank 1: 5 ops, expected 4 as on rank 0")
    other = rank_options(SHARDS[1], "reduce reduce", "reduce other")
    refused(
        [ranks()[0], other, ranks()[2]],
        "mixed plan of rank 1, line .*: op all_reduce other, expected op all_reduce reduce",
    )


def test_a_rank_that_cannot_load_leaves_nothing_open(faults: FaultTable, tensors: list[TensorSource]) -> None:
    broken = rank_options(SHARDS[2], "out=y", "out=z")
    with pytest.raises(InvalidRequestError, match="^rank 2: .*no buffer is named 'z'"):
        Engine.create(options(faults, tensors, ranks=[*ranks()[:2], broken]))
    assert faults.open_devices() == 0
