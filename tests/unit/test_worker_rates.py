"""What the worker measures of itself, what it refuses by it, and how it notices that it is stuck."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine_worker.backlog import Backlog
from engine_worker.rates import StepRates
from engine_worker.runtime.records import EngineProgress
from engine_worker.scheduler.request import Chunk, StepPlan
from engine_worker.watchdog import wait_until_stalled, wait_until_stuck
from glmserve.engine.v1 import engine_pb2
from glmserve.service.pace import UNKNOWN, Pace
from tests.unit.scheduler_driver import make_request
from tests.unit.test_worker_service import Gate
from tests.unit.worker_harness import running_worker, submit, worker_limits

REQUEST = make_request(1, [1])


def step(prefills: int, decodes: int) -> StepPlan:
    """`prefills` rows of one prompt, and `decodes` requests that get a token each."""
    chunks = [Chunk(REQUEST, 0, prefills, False)] * bool(prefills) + [Chunk(REQUEST, 1, 1, True)] * decodes
    return StepPlan(1, (), chunks=chunks)


class TestStepRates:
    def test_well_filled_steps_are_measured(self) -> None:
        rates = StepRates(max_step_tokens=100, max_running=8)
        for _ in range(5):
            rates.step(step(80, 8), 0.1)
        assert rates.pace.prefill_tokens_per_s == pytest.approx(800)
        assert rates.pace.decode_tokens_per_s == pytest.approx(80)

    def test_small_steps_say_nothing(self) -> None:
        rates = StepRates(max_step_tokens=100, max_running=8)
        rates.step(step(49, 3), 10.0)
        assert rates.pace == UNKNOWN

    def test_the_newest_steps_weigh_most(self) -> None:
        rates = StepRates(max_step_tokens=100, max_running=8)
        for seconds in [0.1] * 50 + [0.2] * 50:
            rates.step(step(0, 8), seconds)
        assert rates.pace.decode_tokens_per_s == pytest.approx(40, rel=0.01)

    def test_requests_that_brought_nothing_do_not_count(self) -> None:
        rates = StepRates(max_step_tokens=100, max_running=8)
        for tokens in (0, 50, 0, 50):
            rates.request(tokens)
        assert rates.pace.tokens_per_request == 50

    def test_the_first_request_weighs_as_one_of_many(self) -> None:
        rates = StepRates(max_step_tokens=100, max_running=8)
        for tokens in [4] + [100] * 9:
            rates.request(tokens)
        assert rates.pace.tokens_per_request == pytest.approx(90.4)
        for _ in range(50):
            rates.request(100)
        assert rates.pace.tokens_per_request == pytest.approx(100, rel=0.01)


def test_the_delay_is_the_estimate_or_what_was_waited_lately() -> None:
    backlog = Backlog(max_requests=10, max_prompt_tokens=1000)
    backlog.add((1, 1), 500, now=0.0)
    pace = Pace(250.0, 100.0, 50.0)
    queue_s = backlog.queue_s(pace, free_places=4, running_prompt_tokens=0)
    assert queue_s == 2.0
    assert backlog.queue_s(pace, free_places=4, running_prompt_tokens=250) == 3.0
    assert backlog.retry_after_ms(queue_s) == 2000
    backlog.started((1, 1), now=10.0)
    assert backlog.retry_after_ms(0.0) == 2000, "a fifth of the ten seconds of the only one that waited"


async def test_a_busy_worker_refuses_what_cannot_meet_its_deadline_but_not_what_was_begun_elsewhere() -> None:
    async with running_worker(worker_limits(max_running=2)) as worker, worker.stream() as stream:
        # Both places are busy, and each step takes half a minute: that is the pace.
        worker.loop._clock = lambda: time.monotonic() + 30.0 * worker.engine._collected
        await stream.send(submit(1, [1], 40), submit(2, [2], 40))
        for request_id in (1, 2):
            await stream.end_of(request_id)
        gate = Gate(worker, step=len(worker.engine.steps))
        await stream.send(submit(3, [1], 40), submit(4, [2], 40))
        await asyncio.to_thread(gate.reached.wait)
        await worker.wait_for_load(lambda load: load.running_requests == 2 and load.decode_tokens_per_s > 0)
        await stream.send(
            submit(5, [3], 5, timeout_ms=1000), submit(6, [3], 5, timeout_ms=10**9), submit(7, [3], 5, generated=[4])
        )
        rejection = (await stream.end_of(5)).rejection
        assert rejection is not None
        assert rejection.reason == engine_pb2.REJECTION_REASON_OVERLOADED
        assert "the deadline is in 1000 ms, the first token is expected in" in rejection.message
        assert rejection.retry_after_ms == 30_000, "the most that is told"
        gate.open()
        for request_id in (3, 4, 6, 7):
            assert (await stream.end_of(request_id)).finish is not None


async def test_the_rest_of_a_prompt_that_has_begun_is_before_a_new_one() -> None:
    async with running_worker(worker_limits(max_running=4)) as worker, worker.stream() as stream:
        # Steps of 64 rows take half a minute each: that is the pace.
        worker.loop._clock = lambda: time.monotonic() + 30.0 * worker.engine._collected
        await stream.send(submit(1, [1] * 200, 1))
        await stream.end_of(1)
        gate = Gate(worker, step=len(worker.engine.steps))
        await stream.send(submit(2, [2] * 250, 1))
        await asyncio.to_thread(gate.reached.wait)
        load = await worker.wait_for_load(lambda load: load.running_requests == 1)
        assert load.waiting_requests == 0
        assert load.waiting_prompt_tokens == 250 - 2 * 64, "two steps are in flight"
        await stream.send(submit(3, [3], 1, timeout_ms=50_000), submit(4, [3], 1, timeout_ms=200_000))
        rejection = (await stream.end_of(3)).rejection
        assert rejection is not None
        assert rejection.reason == engine_pb2.REJECTION_REASON_OVERLOADED
        gate.open()
        for request_id in (2, 4):
            assert (await stream.end_of(request_id)).finish is not None
        await worker.wait_for_load(lambda load: load.waiting_prompt_tokens == 0)


async def test_what_was_begun_elsewhere_is_taken_by_a_full_queue() -> None:
    limits = worker_limits(max_running=1)
    async with running_worker(limits, max_waiting=1) as worker, worker.stream() as stream:
        gate = Gate(worker)
        await stream.send(submit(1, [1], 5))
        await asyncio.to_thread(gate.reached.wait)
        await worker.wait_for_load(lambda load: load.running_requests == 1)
        await stream.send(submit(2, [2], 5), submit(3, [3], 5), submit(4, [4], 5, generated=[1]))
        assert (await stream.end_of(3)).rejection is not None
        gate.open()
        assert (await stream.end_of(4)).finish is not None


async def test_the_age_of_a_step_grows_until_it_ends_and_is_nothing_when_idle() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        gate = Gate(worker)
        await stream.send(submit(1, [1], 5))
        await asyncio.to_thread(gate.reached.wait)
        await worker.wait_for_load(lambda load: load.step_age_ms > 5)
        error = await wait_until_stuck(lambda: worker.loop.step_age_s, 0.02)
        assert "a step has not ended for 0.0" in str(error)
        gate.open()
        await stream.end_of(1)
        await worker.wait_for_load(lambda load: load.step_age_ms == 0)


async def test_a_slow_step_that_ends_in_time_is_not_stuck() -> None:
    ages = iter([0.0, 0.015, 0.001, 0.03])
    error = await wait_until_stuck(lambda: next(ages), 0.02)
    assert "0.0 s, step_timeout_seconds is 0.02" in str(error)
    assert next(ages, None) is None


async def test_ranks_that_stand_still_are_found_and_where() -> None:
    """Only while a step is in flight, and not while any rank gets on."""
    moving = [EngineProgress(calls, "rank 0 in op a") for calls in range(20)]
    idle = [EngineProgress(19, "")] * 20
    still = [EngineProgress(19, "rank 1 in op b of step 3")] * 10
    looks = iter([*moving, *idle, *still])
    error = await wait_until_stalled(lambda: next(looks), 0.01)
    assert str(error) == (
        "the engine is stuck: no rank has ended an operation for 0.01 s (stall_seconds): rank 1 in op b of step 3"
    )
    assert len(list(looks)) <= 2
