"""Greedy text of the embedded model on GPUs is the CPU's, but where its two best logits are nearly equal."""

from __future__ import annotations

import pytest

from deploy.models.catalog import SMOLLM2, SMOLLM2_4KV, EmbeddedModel, resolve_model
from engine_worker.models.exchange import REPLICATED, Exchanges
from engine_worker.models.layout import ONE_RANK, Parallelism
from tests.golden.embedded_text import run
from tests.golden.table import TABLE, most_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(TABLE == "cpu", reason="compares a GPU with the CPU: GLM_TEST_TABLE=cuda where there is one"),
]


@pytest.mark.parametrize(
    ("model", "layout", "exchanges"),
    [
        (SMOLLM2, ONE_RANK, REPLICATED),
        (SMOLLM2_4KV, Parallelism(2, 2), REPLICATED),
        (SMOLLM2_4KV, Parallelism(2, 1), REPLICATED),
        (SMOLLM2_4KV, Parallelism(2, 2), Exchanges("all_to_all", "all_to_all")),
    ],
    ids=["one", "experts divided", "experts cut", "all to all"],
)
def test_greedy_text(model: EmbeddedModel, layout: Parallelism, exchanges: Exchanges) -> None:
    if layout.tp > most_ranks():
        pytest.skip(f"{layout.tp} ranks need a GPU each, this machine has {most_ranks()}")
    assert run(resolve_model(model.name), layout, exchanges).problems == []
