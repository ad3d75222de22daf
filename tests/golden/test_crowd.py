"""A seeded request's tokens are the same alone and in a crowd, token for token, at every number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from engine_worker.models import build_model
from engine_worker.models.layout import ONE_RANK, Parallelism
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.c_types import PAGE_SIZE
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions, Sampling, StepBatch
from tests.golden.cases import CASES
from tests.golden.session import Tokens
from tests.golden.table import MAX_CONTEXT, TABLE, most_ranks

CROWD = 33
PAGES_A_SLOT = MAX_CONTEXT // PAGE_SIZE
NONE = np.empty(0, np.int32)
BY_NAME = {case.name: case for case in CASES}
ALONE = ["f32_glm47", "fp8_channel_bf16", "fp8_channel_odd_sizes"]
ON_RANKS = [("fp8_channel_8_kv_heads", 4, 2), ("bf16_3_kv_heads", 3, 3)]


@dataclass
class Running:
    """Request `number` in slot `number`: prompt and length differ from its neighbours'."""

    number: int
    prompt: Tokens
    tokens: list[int] = field(default_factory=list)

    @property
    def max_tokens(self) -> int:
        return 3 + self.number % 11


def make(number: int, tokens: Tokens) -> Running:
    return Running(number, tokens[number % 20 : number % 20 + 1 + number % 7])


def submit(engine: Engine, requests: Sequence[Running], pieces: Sequence[Tokens], decode: bool) -> None:
    """One step in which each request computes its piece, and samples."""
    starts = np.cumsum([0, *(len(piece) for piece in pieces)]).astype(np.int32)
    firsts = [len(request.prompt) + len(request.tokens) - 1 if decode else 0 for request in requests]
    positions = [np.arange(first, first + len(piece)) for first, piece in zip(firsts, pieces, strict=True)]
    updates = [
        (request.number, index, request.number * PAGES_A_SLOT + index)
        for request in requests
        for index in range(0 if decode else PAGES_A_SLOT)
    ]
    engine.submit(
        StepBatch(
            token_ids=np.concatenate(pieces).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            seq_slots=np.array([request.number for request in requests], np.int32),
            seq_starts=starts,
            sample_rows=starts[1:] - 1,
            page_updates=np.array(updates, np.int32).reshape(-1, 3),
            decode=decode,
        )
    )
    for request, token in zip(requests, engine.collect().token_ids.tolist(), strict=True):
        request.tokens.append(token)


def run(engine: Engine, requests: Sequence[Running]) -> list[list[int]]:
    """All prompts in one step, then decodes until the last request has its tokens."""
    for request in requests:
        sampling = Sampling(
            seed=request.number,
            temperature=1.0,
            top_p=0.95,
            repetition_penalty=1.1 if request.number % 2 else 1.0,
            prompt_len=len(request.prompt),
        )
        engine.bind_slot(request.number, sampling, request.prompt, NONE)
    submit(engine, requests, [request.prompt for request in requests], decode=False)
    while running := [request for request in requests if len(request.tokens) < request.max_tokens]:
        submit(engine, running, [np.array([-1], np.int32)] * len(running), decode=True)
    for request in requests:
        engine.release_slot(request.number)
    return [request.tokens for request in requests]


@pytest.mark.parametrize("name", ALONE)
def test_tokens_do_not_depend_on_company(name: str) -> None:
    check(name, ONE_RANK)


@pytest.mark.parametrize(("name", "tp", "ep"), ON_RANKS)
def test_tokens_do_not_depend_on_company_on_ranks(name: str, tp: int, ep: int) -> None:
    if tp > most_ranks():
        pytest.skip(f"{tp} ranks need a GPU each, this machine has {most_ranks()}")
    check(name, Parallelism(tp, ep))


def check(name: str, parallelism: Parallelism) -> None:
    directory = BY_NAME[name].directory
    tokens: Tokens = np.load(directory / "expected.npz")["token_ids"]
    model = build_model(directory, "auto", parallelism)
    options = EngineOptions(
        kernels_path=kernel_table_path(TABLE),
        ranks=rank_options(model, first_gpu=None if TABLE == "cpu" else 0),
        tensors=model.tensors,
        max_rows=8 * CROWD,
        max_samples=CROWD,
        max_slots=CROWD,
        max_context=MAX_CONTEXT,
        num_pages=CROWD * PAGES_A_SLOT,
    )
    with Engine.create(options) as engine:
        crowd = run(engine, [make(number, tokens) for number in range(CROWD)])
        alone = [run(engine, [make(number, tokens)])[0] for number in range(CROWD)]
    assert crowd == alone
    assert len({tuple(found[:3]) for found in crowd}) > CROWD // 2, "the requests are of different tokens"
