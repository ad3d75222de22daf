"""Requests of all kinds beside each other, a third of them aborted: each ends once, and pages and slots come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_worker.models import build_model
from engine_worker.models.layout import ONE_RANK, Parallelism
from engine_worker.runtime.abi import Engine
from engine_worker.scheduler.request import Reason
from tests.golden.cases import CASES
from tests.golden.mixed_requests import LIMITS, Run, engine_options, make_requests, run_mixed
from tests.golden.table import most_ranks

COUNT = 60
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["f32_glm47", "fp8_channel_bf16"])
def test_nothing_is_left_behind(name: str) -> None:
    check(name, ONE_RANK)


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2)])
def test_nothing_is_left_behind_by_ranks(tp: int, ep: int) -> None:
    if tp > most_ranks():
        pytest.skip(f"{tp} ranks need a GPU each, this machine has {most_ranks()}")
    check("fp8_channel_8_kv_heads", Parallelism(tp, ep))


def check(name: str, parallelism: Parallelism) -> None:
    model = build_model(BY_NAME[name].directory, "auto", parallelism)
    vocab = model.config.vocab_size
    with Engine.create(engine_options(model)) as engine:
        run = run_mixed(engine, vocab, COUNT)
        requests = make_requests(COUNT, vocab)
        alone = []
        for request in requests[:20]:
            alone.append(Run(engine, [request], limits=replace(LIMITS, prefix_cache=False)))
            alone[-1].go()
    assert set(run.finishes) == {request.key for request in requests}
    assert {finish.reason for finish in run.finishes.values()} == {Reason.LENGTH, Reason.ABORTED}
    assert run.scheduler.totals.preemptions > 0
    assert run.scheduler.totals.cached_prompt_tokens > 0
    assert run.scheduler.allocator.num_free + run.scheduler.allocator.num_cached == LIMITS.num_pages
    for request, single in zip(requests, alone, strict=False):
        tokens = run.tokens[request.key]
        assert tokens == single.tokens[request.key][: len(tokens)], f"{request.key} said something else in the crowd"
        if run.finishes[request.key].reason is Reason.LENGTH:
            assert len(tokens) == request.max_tokens
