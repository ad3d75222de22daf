"""Plans whose ranks have rows to themselves: what of them is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_worker.errors import InvalidRequestError, UnsupportedError
from engine_worker.models import Model, Parallelism, build_model
from engine_worker.models.exchange import Exchanges
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions, RankOptions, TensorSource
from tests.golden.cases import CASES
from tests.native import tiny
from tests.native.fault_table import FaultTable

DISPATCH = "first=4 count=4\n"
CASE = next(case for case in CASES if case.name == "f32_8_kv_heads")


@pytest.fixture(scope="module")
def model() -> Model:
    return build_model(CASE.directory, "auto", Parallelism(2, 2), exchanges=Exchanges("all_to_all", "all_to_all"))


def create(model: Model, ranks: list[RankOptions]) -> None:
    options = EngineOptions(
        kernels_path=kernel_table_path("cpu"),
        ranks=ranks,
        tensors=model.tensors,
        max_rows=8,
        max_samples=2,
        max_slots=2,
        max_context=16,
        num_pages=2,
        num_threads=1,
    )
    Engine.create(options).close()


def test_one_rank_has_nobody_to_exchange_with(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="an engine of one rank has nobody to exchange data with"):
        create(model, rank_options(model)[:1])


def test_ranks_hold_experts_in_their_order(model: Model) -> None:
    first, second = rank_options(model)
    moved = second.mixed_plan.replace(DISPATCH, DISPATCH.replace("4", "0", 1))
    with pytest.raises(InvalidRequestError, match="op moe_dispatch layers.1.moe.dispatch: first 0, expected 4, rank"):
        create(model, [first, replace(second, mixed_plan=moved)])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows=O", "rows=T", "rows: 'T', expected"),
        ("op silu_mul layers.1.moe.shared.silu_mul", "op silu_mul layers.1.moe.shared.silu_mul rows=S", "rows"),
        ("x=expert_hidden down=", "x=x down=", "x: buffer x has"),
        ("products=expert_products", "products=delta", "products: buffer delta has"),
    ],
)
def test_arguments_are_checked(model: Model, old: str, new: str, message: str) -> None:
    ranks = [replace(rank, mixed_plan=rank.mixed_plan.replace(old, new, 1)) for rank in rank_options(model)]
    with pytest.raises(InvalidRequestError, match=message):
        create(model, ranks)


def test_a_table_without_the_exchange_says_so(faults: FaultTable, tensors: list[TensorSource]) -> None:
    text = tiny.plan("mixed", "op reduce_scatter r x=x", "op all_gather g x=x", "op all_gather h x=x")
    with pytest.raises(UnsupportedError, match=r"fault lacks .*: reduce_scatter \(1 calls\), all_gather \(2 calls\)"):
        Engine.create(tiny.options(faults.path, tensors, mixed_plan=text))
