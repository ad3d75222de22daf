"""The engine thread, on an engine that the test controls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from random import Random

import pytest

from engine_worker.constraints.masks import MaskFiller
from engine_worker.errors import DeviceError
from engine_worker.runtime.loop import EngineLoop, LoopOutputs
from engine_worker.runtime.records import Sampling
from engine_worker.runtime.step import StepPacker
from engine_worker.scheduler.request import Finish, Reason
from engine_worker.scheduler.scheduler import Scheduler
from tests.unit.scheduler_driver import PAGE, limits, make_request
from tests.unit.scripted_engine import VOCAB, ScriptedEngine, undisturbed


class Harness:
    """A loop, and everything it delivered."""

    def __init__(self) -> None:
        sizes = limits()
        self.engine = ScriptedEngine(sizes.num_pages, PAGE)
        self.scheduler = Scheduler(sizes)
        self.delivered: queue.SimpleQueue[LoopOutputs] = queue.SimpleQueue()
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.started: list[int] = []
        self.failure: str | None = None
        packer = StepPacker(sizes.max_step_tokens, sizes.max_running, sizes.max_context // PAGE)
        masks = MaskFiller(sizes.max_running, VOCAB)
        self.loop = EngineLoop(self.engine, self.scheduler, packer, masks, self.delivered.put, max_in_flight=2)

    def read(self) -> LoopOutputs:
        outputs = self.delivered.get(timeout=30)
        for token in outputs.tokens:
            self.tokens.setdefault(token.key[1], []).append(token.token_id)
        for finish in outputs.finishes:
            assert finish.key[1] not in self.finishes
            self.finishes[finish.key[1]] = finish
        self.failure = self.failure or outputs.failure
        self.started += [key[1] for key in outputs.started]
        return outputs

    def finish_of(self, number: int) -> Finish:
        while number not in self.finishes:
            self.read()
        return self.finishes[number]


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    made.loop.start()
    yield made
    made.loop.stop()


def test_runs_requests_and_delivers_each_step_once(harness: Harness) -> None:
    first, second = make_request(1, [1, 2], 6), make_request(2, [3], 4)
    harness.loop.submit(first)
    harness.loop.submit(second)
    assert harness.finish_of(1).reason is Reason.LENGTH
    assert harness.finish_of(2).reason is Reason.LENGTH
    assert harness.tokens == {1: undisturbed([1, 2], first.sampling, 6), 2: undisturbed([3], second.sampling, 4)}
    assert harness.started == [1, 2]


def test_two_steps_are_in_flight(harness: Harness) -> None:
    in_flight: list[int] = []
    harness.engine.before_collect = lambda step: in_flight.append(harness.engine.uncollected)
    harness.loop.submit(make_request(1, [1, 2], 6))
    harness.finish_of(1)
    assert in_flight == [2, 2, 2, 2, 2, 1]


def test_a_start_is_told_before_its_step_ends(harness: Harness) -> None:
    go = threading.Event()
    harness.engine.before_collect = lambda step: assert_true(go.wait(30))
    harness.loop.submit(make_request(1, [1, 2], 1))
    outputs = harness.read()
    assert outputs.started == [(1, 1)]
    assert outputs.load.running_requests == 1
    assert not outputs.tokens
    go.set()
    harness.finish_of(1)


def test_last_load_says_that_everything_is_free(harness: Harness) -> None:
    harness.loop.submit(make_request(1, [1, 2], 3, stop_ids=range(50)))
    harness.finish_of(1)
    outputs = harness.read()
    assert outputs.load.free_pages == outputs.load.total_pages
    assert outputs.load.steps == 2
    assert outputs.load.generated_tokens == 1


def test_logprobs_go_with_their_tokens(harness: Harness) -> None:
    harness.loop.submit(make_request(1, [1], 1))
    harness.loop.submit(make_request(2, [2], 1, num_logprobs=3))
    found = {}
    while len(harness.finishes) < 2:
        found.update({token.key[1]: token for token in harness.read().tokens})
    assert found[1].logprobs is None
    logprobs = found[2].logprobs
    assert logprobs is not None
    assert logprobs.logprob == -found[2].token_id
    assert len(logprobs.top_ids) == len(logprobs.top_logprobs) == 3
    assert logprobs.top_ids[0] == found[2].token_id


def test_stop_ends_what_is_open() -> None:
    harness = Harness()
    reached = threading.Event()
    harness.engine.before_collect = lambda step: reached.set()
    harness.loop.start()
    harness.loop.submit(make_request(1, [1], 60))
    assert reached.wait(30)
    harness.loop.stop()
    assert harness.finish_of(1).reason in (Reason.UNAVAILABLE, Reason.LENGTH)
    assert harness.engine.uncollected == 0


def test_a_failure_ends_every_request_with_its_usage(harness: Harness) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise DeviceError("layers.17.attn: device lost")

    harness.engine.before_collect = fail
    harness.loop.submit(make_request(1, [1, 2], 20))
    finish = harness.finish_of(1)
    assert finish.reason is Reason.UNAVAILABLE
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (2, 3)
    harness.loop.submit(make_request(2, [1, 2], 20))
    assert harness.finish_of(2).reason is Reason.UNAVAILABLE, "none is left without an end"


def test_a_failure_is_told_in_one_line(harness: Harness) -> None:
    def fail(step: int) -> None:
        raise ZeroDivisionError("division by zero")

    harness.engine.before_collect = fail
    harness.loop.submit(make_request(1, [1, 2], 20))
    while (outputs := harness.read()).failure is None:
        pass
    assert outputs.failure == "ZeroDivisionError: division by zero"


def test_idle_check_of_the_books_fails_loudly(harness: Harness) -> None:
    harness.loop.submit(make_request(1, [1, 2], 2))
    harness.finish_of(1)
    harness.scheduler.allocator._references[3] += 1
    while (outputs := harness.read()).failure is None:
        pass
    assert outputs.failure == "KV page 3 has 1 references, its owners know of 0"


def test_slots_are_released_before_they_are_bound_again(harness: Harness) -> None:
    for number in range(6):
        harness.loop.submit(make_request(number, [number], 2))
    for number in range(6):
        harness.finish_of(number)
    bound: set[str] = set()
    for call in harness.engine.calls:
        match call.split():
            case ["bind", slot]:
                assert slot not in bound
                bound.add(slot)
            case ["release", slot]:
                bound.remove(slot)
    assert bound <= {"0", "1", "2", "3"}


@pytest.mark.parametrize("seed", range(3))
def test_submits_and_aborts_from_many_threads(harness: Harness, seed: int) -> None:
    def use(thread: int) -> None:
        random = Random(seed * 10 + thread)
        for number in range(thread * 100, thread * 100 + 25):
            harness.loop.submit(make_request(number, [thread] * random.randint(1, 20), random.randint(1, 20)))
            if random.random() < 0.5:
                harness.loop.abort((1, random.randint(thread * 100, number)))

    threads = [threading.Thread(target=use, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [thread * 100 + index for thread in range(4) for index in range(25)]
    for number in numbers:
        finish = harness.finish_of(number)
        assert finish.reason in (Reason.LENGTH, Reason.ABORTED)
        prompt = [number // 100] * finish.usage.prompt_tokens
        tokens = harness.tokens.get(number, [])
        assert tokens == undisturbed(prompt, Sampling(prompt_len=len(prompt)), len(tokens))
        assert finish.usage.completion_tokens == len(tokens)
    assert harness.failure is None


def assert_true(value: bool) -> None:
    assert value
