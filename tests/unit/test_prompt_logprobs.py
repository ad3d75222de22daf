"""Log-probabilities of prompts: each token's once, in order, whatever else runs."""

from __future__ import annotations

from random import Random

import pytest

from engine_worker.scheduler.request import Reason
from engine_worker.validation import MAX_PROMPT_WITH_LOGPROBS, InvalidFieldError, Validator
from glmserve.engine.v1 import engine_pb2
from tests.unit.scheduler_driver import Driver, limits, make_request, rows
from tests.unit.scripted_engine import VOCAB, undisturbed
from tests.unit.worker_harness import running_worker, submit


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 11, 12, 13, 40])
def test_every_prompt_token_but_the_first_is_scored_once(length: int) -> None:
    driver = Driver(limits())
    prompt = [index % VOCAB for index in range(length)]
    request = make_request(1, prompt, 4, num_prompt_logprobs=0)
    driver.submit(request)
    driver.run()
    assert driver.scored.get(1, []) == prompt[1:]
    assert driver.tokens[1] == undisturbed(prompt, request.sampling, 4)


def test_a_step_has_no_more_samples_than_requests_may_run() -> None:
    driver = Driver(limits(max_running=4, max_step_tokens=12), depth=1)
    driver.submit(make_request(1, range(10), 2, num_prompt_logprobs=0))
    driver.submit(make_request(2, [1, 2], 2))
    driver.submit(make_request(3, [3] * 9, 2, num_prompt_logprobs=0))
    driver.push()
    # Half for the first, one for the second, and what is left for the third.
    assert rows(driver.plans[0]) == {1: (0, 2, False), 2: (0, 2, True), 3: (0, 1, False)}
    driver.run()
    assert driver.scored == {1: list(range(1, 10)), 3: [3] * 8}


def test_those_that_decode_go_on_beside_it() -> None:
    driver = Driver(limits(max_running=4), depth=1)
    for number in (1, 2, 3):
        driver.submit(make_request(number, [number], 12))
    driver.push()
    driver.pull()
    driver.submit(make_request(4, range(6), 2, num_prompt_logprobs=0))
    for _ in range(6):
        driver.push()
        driver.pull()
    assert [len(driver.tokens[number]) for number in (1, 2, 3)] == [7, 7, 7]
    driver.run()
    assert driver.scored == {4: [1, 2, 3, 4, 5]}


def test_published_pages_are_not_used_for_it() -> None:
    driver = Driver(limits())
    prompt = list(range(9))
    for number, asked in ((1, -1), (2, 0), (3, -1)):
        driver.submit(make_request(number, prompt, 1, num_prompt_logprobs=asked))
        driver.run()
    assert [driver.finishes[number].usage.cached_prompt_tokens for number in (1, 2, 3)] == [0, 0, 8]
    assert driver.scored == {2: prompt[1:]}


@pytest.mark.parametrize("seed", range(40))
def test_any_mixture(seed: int) -> None:
    """Few pages, so that some are preempted and computed again; aborts; all depths."""
    source = Random(seed)
    driver = Driver(limits(num_pages=source.choice([8, 16]), max_context=32), depth=source.choice([1, 2]))
    requests = {}
    for number in range(12):
        prompt = [source.randrange(VOCAB) for _ in range(source.randrange(1, 20))]
        asked = source.choice([-1, 0])
        requests[number] = make_request(number, prompt, source.randrange(1, 12), num_prompt_logprobs=asked, seed=number)
    waiting = list(requests)
    while waiting or driver.in_flight or driver.scheduler.num_open:
        if waiting and source.random() < 0.5:
            driver.submit(requests[waiting.pop()])
        elif driver.scheduler.num_open and source.random() < 0.03:
            driver.abort(source.choice(list(driver.tokens)))
        else:
            driver.advance()
    for number, request in requests.items():
        prompt = request.tokens[: request.prompt_len].tolist()
        scored = driver.scored.get(number, [])
        expected = prompt[1:] if request.num_prompt_logprobs >= 0 else []
        whole = driver.finishes[number].reason is not Reason.ABORTED
        assert scored == (expected if whole else expected[: len(scored)])
        if whole:
            assert driver.tokens[number] == undisturbed(prompt, request.sampling, request.max_tokens)


@pytest.mark.parametrize(("of_prompt", "of_tokens"), [(0, None), (3, None), (1, 2), (2, 0)])
async def test_they_come_with_the_first_token(of_prompt: int, of_tokens: int | None) -> None:
    async with running_worker() as worker, worker.stream(credit=100) as stream:
        prompt = list(range(10, 23))
        await stream.send(submit(1, prompt, 4, prompt_logprobs=of_prompt, logprobs=of_tokens), submit(2, [5], 4))
        ended = await stream.end_of(1)
        first, *others = ended.prompt_logprobs
        assert first == engine_pb2.TokenLogprobs()
        assert [-entry.logprob for entry in others] == prompt[1:]
        assert {len(entry.top_token_ids) for entry in others} == {of_prompt}
        assert ended.prompt_logprobs_at == [0]
        assert [len(entry.top_token_ids) for entry in ended.logprobs] == ([] if of_tokens is None else [of_tokens] * 4)
        assert (await stream.end_of(2)).prompt_logprobs == []


async def test_a_prompt_of_one_token_has_an_empty_one() -> None:
    async with running_worker() as worker, worker.stream(credit=100) as stream:
        await stream.send(submit(1, [5], 2, prompt_logprobs=2))
        assert (await stream.end_of(1)).prompt_logprobs == [engine_pb2.TokenLogprobs()]


def test_a_prompt_that_no_message_has_room_for_is_refused() -> None:
    limits_ = limits(num_pages=1 << 14, max_context=1 << 15)
    message = submit(1, [1] * (MAX_PROMPT_WITH_LOGPROBS + 1), prompt_logprobs=0)
    with pytest.raises(InvalidFieldError, match="is set with 8193 prompt tokens, allowed: at most 8192"):
        Validator(VOCAB, (), limits_).request(1, message, 0.0)
    del message.prompt_token_ids[0]
    assert Validator(VOCAB, (), limits_).request(1, message, 0.0).num_prompt_logprobs == 0


async def test_they_are_forgotten_with_their_request() -> None:
    async with running_worker() as worker, worker.stream(credit=0) as stream:
        await stream.send(submit(1, list(range(20)), 30, prompt_logprobs=0), aborts=[1])
        await stream.send(credit=10)
        ended = await stream.end_of(1)
        assert ended.finish is not None
        assert ended.finish.reason == engine_pb2.FINISH_REASON_ABORTED
