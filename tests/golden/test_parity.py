"""Two kernel tables in lockstep on the golden checkpoints: each op gives the same on the same inputs.

On a machine without a GPU the CPU's instruction sets are the two tables: portable and the widest. GLM_TEST_TABLE=cuda
holds the CUDA table against the CPU's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from engine_worker.models import Model, build_model
from engine_worker.parity.lockstep import Lockstep, OpError, ParityError, bind_greedy_and_seeded, sequence_steps
from engine_worker.parity.outputs import compare
from engine_worker.parity.run import Table, options_of, random_prompts, run_parity, worst_of_each_kind
from engine_worker.plan.record import TOKENS, Buffer, Op
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.records import Synthetic
from tests.golden.cases import CASES, Case
from tests.golden.table import TABLE
from tests.kernels.isa import restore_widest, set_isa
from tests.native.test_synthetic import config_directory

PROMPTS, LENGTH, DECODES = 3, 18, 3


@pytest.fixture
def portable() -> Iterator[None]:
    """Tables that are loaded from now on are the CPU's portable one, until the test takes the widest."""
    library = ctypes.CDLL(str(kernel_table_path("cpu")))
    assert set_isa(library, "portable")
    yield
    restore_widest(library)


def lockstep(model: Model) -> list[OpError]:
    prompts = random_prompts(PROMPTS, LENGTH, model.config.vocab_size)
    tested = Table(kernel_table_path(TABLE))
    return list(run_parity(model, Table(kernel_table_path("cpu")), tested, prompts, DECODES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_checkpoints(case: Case) -> None:
    errors = lockstep(build_model(case.directory))
    assert {found.kind for found in errors} >= {"embed", "rms_norm", "linear", "paged_attention"}
    assert len({found.step for found in errors}) == 1 + DECODES
    for found in worst_of_each_kind(errors):
        print(found.kind, found.label, found.difference)


def test_portable_against_the_widest(portable: None, tmp_path: Path) -> None:
    """Deep enough that an error of one layer would grow, were it not taken back after each op."""
    model = build_model(config_directory(tmp_path, num_hidden_layers=6), synthetic_seed=0)
    found = portable_against_widest(model, model)
    assert max(error.difference.error for error in found) > 0, "they do round differently"


def portable_against_widest(model: Model, tested: Model) -> list[OpError]:
    prompts = random_prompts(PROMPTS, LENGTH, model.config.vocab_size)
    table = Table(kernel_table_path("cpu"))
    with Engine.create(options_of(model, table, prompts, DECODES)) as reference:
        restore_widest(ctypes.CDLL(str(table.path)))
        with Engine.create(options_of(tested, table, prompts, DECODES)) as widest:
            for engine in (reference, widest):
                bind_greedy_and_seeded(engine, len(prompts))
            both = Lockstep(model, reference, widest)
            return [found for batch in sequence_steps(prompts, DECODES) for found in both.run(batch)]


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (
            "model.layers.1.self_attn.o_proj.weight_scale",
            r"step 0, mixed plan, op linear layers.1.attn.o: out=delta",
        ),
        (
            "model.layers.2.mlp.experts.3.up_proj.weight_scale",
            r"op moe_gate_up layers.2.moe.gate_up: q=expert_hidden",
        ),
        ("model.layers.1.mlp.gate.weight", r"op moe_route layers.1.moe.route: ids=expert_ids of i32, row \d+: .* inf"),
    ],
)
def test_the_first_op_that_differs_is_named(portable: None, tmp_path: Path, tensor: str, named: str) -> None:
    """The tested engine has other values in one tensor."""
    model = build_model(config_directory(tmp_path, num_hidden_layers=4), synthetic_seed=0)
    other = Synthetic(99, 0.01, 0.3)
    tensors = tuple(replace(source, values=other) if source.name == tensor else source for source in model.tensors)
    with pytest.raises(ParityError, match=named):
        portable_against_widest(model, replace(model, tensors=tensors))


def test_an_op_alone() -> None:
    """Equal scores may swap their experts; NaN is never equal."""
    ids, weights = Buffer("ids", "i32", TOKENS, 2), Buffer("weights", "f32", TOKENS, 2)
    op = Op("moe_route", "route", MappingProxyType({"ids": ids, "weights": weights}))
    scores = np.array([[0.5, 0.5], [0.7, 0.3]], np.float32)
    ours = {"ids": np.array([[1, 2], [3, 4]], np.int32), "weights": scores}
    swapped = {"ids": np.array([[2, 1], [3, 4]], np.int32), "weights": scores}
    assert [found.error for found in compare(op, ours, swapped, {})] == [0, 0]
    other = {"ids": np.array([[1, 2], [3, 5]], np.int32), "weights": np.array([[0.5, 0.5], [0.7, 0.2]], np.float32)}
    first = compare(op, ours, other, {})[0]
    assert (first.row, first.error) == (1, np.inf)
    broken = {**ours, "weights": np.array([[0.5, np.nan], [0.7, 0.3]], np.float32)}
    assert compare(op, broken, ours, {})[1].error == np.inf
