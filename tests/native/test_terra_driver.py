"""A compiled driver does what the built-in executor does: at every count's bounds, and where an op fails or hangs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_worker.driver.compile import ExecutorSetting, with_executor
from engine_worker.errors import DeviceError, InternalError, UnsupportedError, WorkerError
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import RankOptions, TensorSource
from tests.native import test_ranks, tiny
from tests.native.fault_table import FaultTable, Op
from tests.native.tiny import MAX_ROWS, MAX_SAMPLES, batch, bind, step
from tests.terra_toolchain import drivers_kept_in, needs_terra

pytestmark = needs_terra

GLM_DEVICE_ERROR, GLM_INTERNAL = 5, 6
EXECUTORS: list[ExecutorSetting] = ["native", "terra", "terra-debug"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with drivers_kept_in(tmp_path_factory.mktemp("cache")):
        yield


def layered(layers: int, ops: int) -> RankOptions:
    """Plans of `layers` layers with `ops` ops each, beside what every plan has."""
    lines = [f"op quantize layers.{i}.op.{j} x=x q=q scale=qs" for i in range(layers) for j in range(ops)]

    def plan(name: str) -> str:
        return tiny.plan(name, *lines, tiny.OPS[1], drop=[tiny.OPS[1], tiny.QUANTIZE])

    return RankOptions(plan("mixed"), plan("decode"))


def made(
    faults: FaultTable, tensors: list[TensorSource], ranks: list[RankOptions], executor: ExecutorSetting
) -> Engine:
    return Engine.create(tiny.options(faults.path, tensors, ranks=with_executor(ranks, executor)))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("layers", "ops"), [(0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (92, 14)])
def test_every_op_of_every_layer_is_called_once(
    faults: FaultTable, tensors: list[TensorSource], executor: ExecutorSetting, layers: int, ops: int
) -> None:
    with made(faults, tensors, [layered(layers, ops)], executor) as engine:
        bind(engine, 0)
        before = engine.progress().calls
        for decode in (False, True):
            step(engine, batch((0, int(decode), [1]), updates=[(0, 0, 0)], decode=decode))
        assert (faults.calls(Op.EMBED), faults.calls(Op.SAMPLE)) == (2, 2)
        assert faults.calls(Op.QUANTIZE) == 2 * layers * ops
        assert engine.progress().calls - before == 2 * (layers * ops + 2)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_token_and_sample_counts(faults: FaultTable, tensors: list[TensorSource], executor: ExecutorSetting) -> None:
    with made(faults, tensors, [layered(1, 1)], executor) as engine:
        bind(engine, *range(MAX_SAMPLES))
        for rows in (0, 1, 2, MAX_ROWS - 1, MAX_ROWS):
            for samples in {0, min(rows, 1)}:
                chosen = list(range(rows))[-samples:] if samples else []
                sequences = [(2, 5, list(range(rows)))] if rows else []
                result = step(engine, batch(*sequences, samples=chosen, updates=[(2, 0, 9), (2, 1, 8)]))
                assert result.token_ids.tolist() == [5 + rows for _ in chosen]
                assert (faults.rows(Op.EMBED), faults.rows(Op.QUANTIZE), faults.rows(Op.SAMPLE)) == (
                    rows,
                    rows,
                    samples,
                )
                seen = engine.read_buffer("x", (rows, tiny.HIDDEN), np.float32)
                assert (seen == np.arange(rows)[:, None]).all()
        for rows in (1, 2, MAX_SAMPLES):
            sequences = [(slot, 0, [slot]) for slot in range(rows)]
            updates = [(slot, 0, slot) for slot in range(rows)]
            assert step(engine, batch(*sequences, updates=updates, decode=True)).token_ids.tolist() == [1] * rows
            assert (faults.rows(Op.EMBED), faults.rows(Op.SAMPLE)) == (rows, rows)


def failure(
    faults: FaultTable, tensors: list[TensorSource], ranks: list[RankOptions], executor: ExecutorSetting, **fault: Any
) -> WorkerError:
    """What the second step raises."""
    faults.reset()
    with made(faults, tensors, ranks, executor) as engine:
        bind(engine, 0)
        step(engine, batch((0, 0, [1]), updates=[(0, 0, 0)]))
        if "rank" in fault:
            faults.on_rank(fault.pop("rank"))
        faults.fail(**fault)
        engine.submit(batch((0, 1, [1])))
        with pytest.raises(WorkerError) as caught:
            engine.collect()
        return caught.value


@pytest.mark.parametrize(("status", "error"), [(GLM_DEVICE_ERROR, DeviceError), (GLM_INTERNAL, InternalError)])
@pytest.mark.parametrize(
    ("op", "after_calls", "label"),
    [(Op.EMBED, 0, "embed embed"), (Op.QUANTIZE, 2, "quantize layers.1.op.0"), (Op.SAMPLE, 0, "sample sample")],
)
def test_a_failing_op_is_named_as_by_the_built_in_executor(
    faults: FaultTable,
    tensors: list[TensorSource],
    op: Op,
    after_calls: int,
    label: str,
    status: int,
    error: type[WorkerError],
) -> None:
    ranks = [layered(2, 2)]
    told = [
        failure(faults, tensors, ranks, executor, op=op, status=status, after_calls=after_calls)
        for executor in EXECUTORS
    ]
    assert {type(found) for found in told} == {error}
    assert len({str(found) for found in told}) == 1
    assert f"op {label} of kernel table fault returned" in str(told[0]) and str(told[0]).endswith("in step 1")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failing_rank_is_named(faults: FaultTable, tensors: list[TensorSource], rank: int) -> None:
    fault = {"op": Op.LINEAR, "status": GLM_DEVICE_ERROR, "rank": rank}
    told = {str(failure(faults, tensors, test_ranks.ranks(), executor, **fault)) for executor in EXECUTORS}
    assert told == {f"rank {rank}: op linear part of kernel table fault returned GLM_DEVICE_ERROR in step 1"}


def test_a_rank_that_hangs_is_named(faults: FaultTable, tensors: list[TensorSource]) -> None:
    with made(faults, tensors, test_ranks.ranks(), "terra") as engine:
        bind(engine, 0)
        faults.on_rank(1)
        faults.hang(Op.LINEAR)
        engine.submit(batch((0, 0, [1]), updates=[(0, 0, 0)]))
        with ThreadPoolExecutor(1) as threads:
            collected = threads.submit(engine.collect)
            faults.wait_hanging(1)
            while faults.calls(Op.ALL_REDUCE) < 2:
                pass  # the other two ranks come to wait
            where = engine.progress().where
            assert where.startswith("rank 1 in op linear part of step 0; rank 0 in op all_reduce reduce of step 0")
            engine.abort("given up")
            with pytest.raises(DeviceError, match="given up"):
                collected.result()
        faults.reset()


# ---- drivers that are not the plan's ----


QUANTIZE = "op quantize layers.0.op.0 x=x q=q scale=qs"
WIDER = f"buffer e f32 T {tiny.HIDDEN}\nbuffer x f32 T 16\nbuffer q fp8 T 16"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({QUANTIZE: f"{QUANTIZE}\n{QUANTIZE}"}, "mixed plan: the number of ops differs"),
        ({QUANTIZE: "buffer y f32 T 100\nop linear layers.0.op.0 x=x w=table out=y"}, "op linear layers.0.op.0: kind"),
        (
            {
                f"buffer x f32 T {tiny.HIDDEN}\nbuffer q fp8 T {tiny.HIDDEN}": WIDER,
                "table=table out=x": "table=table out=e",
            },
            "op quantize layers.0.op.0: x.cols differs: compile it again",
        ),
    ],
)
def test_a_driver_of_another_plan_is_refused(
    faults: FaultTable, tensors: list[TensorSource], changes: dict[str, str], what: str
) -> None:
    (rank,) = with_executor([layered(1, 1)], "terra")
    mixed, decode = rank.mixed_plan, rank.decode_plan
    for old, new in changes.items():
        assert old in mixed
        mixed, decode = mixed.replace(old, new), decode.replace(old, new)
    with pytest.raises(UnsupportedError, match=what):
        Engine.create(tiny.options(faults.path, tensors, ranks=[RankOptions(mixed, decode, driver=rank.driver)]))


def test_a_driver_of_another_rank_is_refused(faults: FaultTable, tensors: list[TensorSource]) -> None:
    ranks = with_executor(test_ranks.ranks(), "terra")
    ranks[1] = RankOptions(ranks[1].mixed_plan, ranks[1].decode_plan, driver=ranks[0].driver)
    with pytest.raises(UnsupportedError, match=r"is not of this mixed plan: the rank differs"):
        Engine.create(tiny.options(faults.path, tensors, ranks=ranks))


def test_what_is_no_driver_is_refused(faults: FaultTable, tensors: list[TensorSource], tmp_path: Path) -> None:
    for path, what in ((tmp_path / "gone.so", "cannot be loaded"), (faults.path, "does not export glm_driver_query")):
        plans = layered(1, 1)
        ranks = [RankOptions(plans.mixed_plan, plans.decode_plan, driver=path)]
        with pytest.raises(UnsupportedError, match=f"driver {path} {what}"):
            Engine.create(tiny.options(faults.path, tensors, ranks=ranks))
