"""Steps that are held for their masks, and forced tokens: on the host's memory and on a device's, with graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from engine_worker.errors import DeviceError, InvalidRequestError
from engine_worker.models import build_model
from engine_worker.models.layout import Parallelism
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions, MaskArray, Sampling, StepBatch
from tests.golden.cases import CASES
from tests.golden.session import open_session
from tests.kernels.isa import CUDA_DEVICE
from tests.native.device_table import DeviceTable
from tests.native.tiny import NO_TOKENS, batch, ints, step

CASE = next(case for case in CASES if case.name == "f32_glm47")
SLOTS = 8


def options(table: str, tp: int = 1) -> EngineOptions:
    model = build_model(CASE.directory, "auto", Parallelism(tp))
    return EngineOptions(
        kernels_path=DeviceTable().path if table == "device" else kernel_table_path(table),
        ranks=rank_options(model, 0 if table == "cuda" else None),
        tensors=model.tensors,
        max_rows=64,
        max_samples=SLOTS,
        max_slots=SLOTS,
        max_context=64,
        num_pages=40,
        num_threads=2,
    )


@pytest.fixture(params=["cpu", "device", "two ranks", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    table = request.param
    if table == "cuda" and not (CUDA_DEVICE.exists() and kernel_table_path(table).exists()):
        pytest.skip("needs a GPU and `make cuda`")
    with Engine.create(options("cpu", 2) if table == "two ranks" else options(table)) as made:
        yield made


def masks(engine: Engine, *allowed: set[int]) -> MaskArray:
    bits = np.zeros((len(allowed), -(-engine.info().vocab // 32) * 32), bool)
    for row, ids in zip(bits, allowed, strict=True):
        row[list(ids)] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def held(submitted: StepBatch, *sample_masks: int) -> StepBatch:
    return replace(submitted, sample_masks=ints(*sample_masks), num_masks=max(sample_masks) + 1)


def bind(engine: Engine, slot: int, prompt_len: int = 3) -> None:
    sampling = Sampling(seed=slot, temperature=1.0, top_p=0.9, prompt_len=prompt_len, num_logprobs=1)
    engine.bind_slot(slot, sampling, NO_TOKENS, NO_TOKENS)


def test_masks_depend_on_the_step_before_and_others_sample_as_ever(engine: Engine) -> None:
    """Two sequences, of which slot 1 is constrained to successors of its newest token; two steps are in flight."""
    vocab = engine.info().vocab

    def successors(token: int) -> set[int]:
        return {(3 * token + i) % vocab for i in range(5)}

    def run(constrained: bool) -> list[list[int]]:
        for slot in (0, 1):
            bind(engine, slot)
        updates = [(slot, i, 4 * slot + i) for slot in (0, 1) for i in range(4)]
        newest = [step(engine, batch((0, 0, [1, 2, 3]), (1, 0, [4, 5, 6]), updates=updates)).token_ids.tolist()]
        for position in range(3, 40):
            following = batch((0, position, [-1]), (1, position, [-1]), decode=True)
            engine.submit(held(following, -1, 0) if constrained else following)
            if position > 3:
                newest.append(engine.collect().token_ids.tolist())
            if constrained:
                engine.set_masks(masks(engine, successors(newest[-1][1])))
        newest.append(engine.collect().token_ids.tolist())
        for slot in (0, 1):
            engine.release_slot(slot)
        return newest

    free, ruled = run(False), run(True)
    assert [tokens[0] for tokens in free] == [tokens[0] for tokens in ruled]
    chain = [tokens[1] for tokens in ruled]
    assert all(after in successors(before) for before, after in pairwise(chain))
    assert len(set(chain)) > 5
    assert not all(b in successors(a) for a, b in pairwise(tokens[1] for tokens in free))


def test_two_held_steps_take_their_masks_in_order(engine: Engine) -> None:
    bind(engine, 0)
    first = held(batch((0, 0, [1, 2, 3]), updates=[(0, 0, 1)]), 0)
    second = held(batch((0, 3, [-1]), decode=True), 0)
    engine.submit(first)
    engine.submit(second)
    engine.set_masks(masks(engine, {11}))
    assert engine.collect().token_ids.tolist() == [11]
    engine.set_masks(masks(engine, {12}))
    assert engine.collect().token_ids.tolist() == [12]


def test_what_is_said_wrongly_of_masks(engine: Engine) -> None:
    bind(engine, 0)
    good = batch((0, 0, [1, 2, 3]), updates=[(0, 0, 1)])
    with pytest.raises(InvalidRequestError, match="no step is held for masks"):
        engine.set_masks(masks(engine, {1}))
    with pytest.raises(InvalidRequestError, match=r"sample_masks\[0\] 1, expected -1 to 0"):
        engine.submit(replace(good, sample_masks=ints(1), num_masks=1))
    with pytest.raises(InvalidRequestError, match="num_masks 2, expected 0 to 1"):
        engine.submit(replace(good, sample_masks=ints(0), num_masks=2))
    with pytest.raises(InvalidRequestError, match=r"sample_masks: expected contiguous int32 of shape 1"):
        engine.submit(replace(good, sample_masks=ints(0, 0), num_masks=1))
    with pytest.raises(InvalidRequestError, match="masks: expected contiguous uint32"):
        engine.set_masks(np.zeros((1, 4), np.int32))
    engine.submit(held(good, 0))
    with pytest.raises(InvalidRequestError, match="is held, expected glm_engine_set_masks before collect"):
        engine.collect()
    engine.set_masks(masks(engine, {7}))
    assert engine.collect().token_ids.tolist() == [7]


def test_an_engine_is_closed_while_a_step_is_held(engine: Engine) -> None:
    bind(engine, 0)
    engine.submit(held(batch((0, 0, [1, 2, 3]), updates=[(0, 0, 1)]), 0))
    engine.close()


def test_an_aborted_engine_does_not_wait_for_masks(engine: Engine) -> None:
    bind(engine, 0)
    engine.submit(held(batch((0, 0, [1, 2, 3]), updates=[(0, 0, 1)]), 0))
    engine.abort("it is late")
    with pytest.raises(DeviceError, match="it is late"):
        engine.collect()


def test_forced_tokens_bring_the_prompts_log_probabilities(engine: Engine) -> None:
    tokens = np.load(CASE.directory / "expected.npz")["token_ids"][:8]
    with open_session(CASE.directory, kernels=kernel_table_path("cpu")) as session:
        logits = session.decode(tokens).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    bind(engine, 3, prompt_len=8)
    forced = np.append(tokens[1:], -1).astype(np.int32)
    whole = batch((3, 0, tokens.tolist()), samples=range(8), updates=[(3, 0, 5)])
    result = step(engine, replace(whole, forced_tokens=forced))
    assert result.token_ids[:7].tolist() == tokens[1:].tolist()
    np.testing.assert_allclose(result.logprobs[:7], expected[np.arange(7), tokens[1:]], atol=1e-5)
    assert result.top_ids[:, 0].tolist() == expected.argmax(axis=1).tolist()
    engine.release_slot(3)
    bind(engine, 3, prompt_len=8)
    alone = step(engine, batch((3, 0, tokens.tolist()), updates=[(3, 0, 5)]))
    assert alone.token_ids[0] == result.token_ids[7]


def test_forced_tokens_are_checked(engine: Engine) -> None:
    bind(engine, 0)
    good = batch((0, 0, [1, 2, 3]), samples=[0, 2], updates=[(0, 0, 1)])
    with pytest.raises(InvalidRequestError, match=r"sample_rows\[1\] 2: its sequence has been sampled"):
        engine.submit(good)
    with pytest.raises(InvalidRequestError, match=r"forced_tokens\[0\] 100000, expected -1 to"):
        engine.submit(replace(good, forced_tokens=ints(100000, -1)))
    with pytest.raises(InvalidRequestError, match=r"sample_rows\[1\] 2: its sequence has been sampled"):
        engine.submit(replace(good, forced_tokens=ints(-1, 3)))
    assert step(engine, replace(good, forced_tokens=ints(9, -1))).token_ids[0] == 9
