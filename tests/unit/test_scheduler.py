"""The scheduler's policy, one rule at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_worker.errors import InternalError, InvalidRequestError
from engine_worker.scheduler.limits import Limits
from engine_worker.scheduler.request import Reason
from engine_worker.scheduler.scheduler import Scheduler
from tests.unit.scheduler_driver import Driver, limits, make_request, rows
from tests.unit.scripted_engine import undisturbed


def test_decodes_go_first_and_prefill_takes_what_the_budget_leaves() -> None:
    driver = Driver(limits(max_step_tokens=10), depth=1)
    driver.submit(make_request(1, [1, 2, 3]))
    driver.advance()
    driver.advance()
    driver.submit(make_request(2, [1] * 20))
    driver.run()
    assert rows(driver.plans[0]) == {1: (0, 3, True)}
    assert rows(driver.plans[1]) == {1: (3, 1, True), 2: (0, 9, False)}
    assert rows(driver.plans[2]) == {1: (4, 1, True), 2: (9, 9, False)}
    assert rows(driver.plans[3]) == {1: (5, 1, True), 2: (18, 2, True)}


def test_the_plan_is_decode_by_what_the_rows_are() -> None:
    driver = Driver(limits(max_step_tokens=9), depth=1)
    driver.submit(make_request(1, [1] * 10, max_tokens=3))
    driver.run()
    assert [rows(plan)[1] for plan in driver.plans] == [(0, 9, False), (9, 1, True), (10, 1, True), (11, 1, True)]
    assert [plan.decode for plan in driver.plans] == [False, False, True, True], (
        "a prompt's last row alone is no decode"
    )
    assert [step.decode for step in driver.engine.steps] == [plan.decode for plan in driver.plans]


def test_one_chunk_of_a_prompt_makes_a_step_mixed() -> None:
    driver = Driver(limits(max_step_tokens=9), depth=1)
    driver.submit(make_request(1, [1], max_tokens=4))
    driver.advance()
    driver.advance()
    driver.submit(make_request(2, [2], max_tokens=2))
    driver.run()
    assert [(len(plan.chunks), plan.decode) for plan in driver.plans[1:3]] == [(2, False), (2, True)]


def test_next_step_is_planned_before_the_tokens_are_known() -> None:
    driver = Driver(limits())
    driver.submit(make_request(1, [1, 2], max_tokens=3))
    assert driver.push()
    assert driver.push()
    assert rows(driver.plans[1]) == {1: (2, 1, True)}
    assert driver.engine.steps[1].token_ids.tolist() == [-1]
    driver.run()
    assert driver.tokens[1] == undisturbed([1, 2], driver.plans[0].chunks[0].request.sampling, 3)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_a_length_finish_is_foreseen(max_tokens: int) -> None:
    driver = Driver(limits())
    driver.submit(make_request(1, [1, 2], max_tokens=max_tokens))
    driver.run()
    assert len(driver.plans) == max_tokens, "no row is computed beyond the last token"
    assert driver.finishes[1].reason is Reason.LENGTH


def test_a_stop_costs_one_row_whose_token_is_dropped() -> None:
    expected = undisturbed([1, 2], make_request(1, [1, 2]).sampling, 8)
    driver = Driver(limits())
    driver.submit(make_request(1, [1, 2], stop_ids=[expected[3]]))
    driver.run()
    count = expected.index(expected[3]) + 1
    assert driver.tokens[1] == expected[:count]
    assert len(driver.plans) == count + 1


def test_slot_and_pages_stay_until_the_last_step_in_flight_is_collected() -> None:
    driver = Driver(limits(max_running=1, max_step_tokens=8))
    driver.submit(make_request(1, [1, 2], 8))
    driver.submit(make_request(2, [3], 1))
    driver.push()
    driver.push()
    driver.abort(1)
    allocator = driver.scheduler.allocator
    assert not driver.push(), "the only slot is still in use"
    assert allocator.num_free < allocator.num_pages
    driver.pull()
    assert not driver.push()
    driver.pull()
    assert allocator.num_free == allocator.num_pages
    assert driver.push()
    assert driver.plans[-1].released_slots == [0]
    driver.run()


def test_first_come_first_served_within_a_priority() -> None:
    driver = Driver(limits(max_running=1, max_step_tokens=8), depth=1)
    for number, priority in ((1, 0), (2, 0), (3, 1), (4, -1), (5, 1)):
        driver.submit(make_request(number, [number], 1, priority=priority))
    driver.run()
    assert [plan.chunks[0].request.key[1] for plan in driver.plans] == [3, 5, 1, 2, 4]


def test_waiting_weighs_as_much_as_priority_in_the_end() -> None:
    driver = Driver(limits(max_running=1, max_step_tokens=8), depth=1)
    aging = driver.scheduler.limits.aging_s
    driver.submit(make_request(1, [1], 1, priority=0, arrival=0))
    for number in range(2, 6):
        driver.submit(make_request(number, [1], 1, priority=2, arrival=(number - 1) * aging))
    driver.run()
    assert [plan.chunks[0].request.key[1] for plan in driver.plans] == [2, 1, 3, 4, 5]


def test_a_request_that_comes_from_elsewhere_keeps_its_place() -> None:
    driver = Driver(limits(max_running=1, max_step_tokens=8), depth=1)
    for number, age_s, arrival in ((1, 0.0, 10.0), (2, 0.0, 11.0), (3, 1.5, 12.0), (4, 5.0, 13.0)):
        driver.submit(replace(make_request(number, [number], 1, arrival=arrival), age_s=age_s))
    driver.run()
    assert [plan.chunks[0].request.key[1] for plan in driver.plans] == [4, 1, 3, 2]


def test_the_youngest_of_the_lowest_priority_is_preempted_and_resumes() -> None:
    driver = Driver(limits(num_pages=6, prefix_cache=False), depth=2)
    driver.submit(make_request(1, [1] * 4, 16, priority=0))
    driver.submit(make_request(2, [2] * 4, 16, priority=1))
    driver.submit(make_request(3, [3] * 4, 12, priority=0))
    driver.run()
    assert driver.finishes[3].usage.preemptions > 0
    assert driver.finishes[2].usage.preemptions == 0
    for number, max_tokens in ((1, 16), (2, 16), (3, 12)):
        request = make_request(number, [number] * 4)
        assert driver.tokens[number] == undisturbed([number] * 4, request.sampling, max_tokens)


def test_a_resumed_request_recomputes_prompt_and_generated_tokens() -> None:
    driver = Driver(limits(num_pages=6, prefix_cache=False), depth=1)
    driver.submit(make_request(1, [1] * 4, 18, presence_penalty=1.0))
    driver.submit(make_request(2, [2] * 4, 18, presence_penalty=1.0))
    driver.run()
    again = [plan for plan in driver.plans if any(request.key[1] == 2 for request in plan.bound)][1]
    (chunk,) = [chunk for chunk in again.chunks if chunk.request.key[1] == 2]
    assert chunk.start == 0
    assert chunk.rows > 4
    for number in (1, 2):
        sampling = make_request(number, [number] * 4, presence_penalty=1.0).sampling
        assert driver.tokens[number] == undisturbed([number] * 4, sampling, 18)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [
        (60, 5, "need a context of 65 tokens, at most 64 is allowed"),
        (1, 64, "need a context of 65 tokens"),
        (20, 14, r"prompt \(20\) and max_tokens \(14\) need 9 KV pages, at most 8 are allowed"),
    ],
)
def test_a_request_that_can_never_fit_is_refused(prompt: int, max_tokens: int, text: str) -> None:
    """Fault 12: longer than the pool but not than the context, it would block the head of the queue for ever."""
    driver = Driver(limits(num_pages=8, max_context=64))
    with pytest.raises(InvalidRequestError, match=text):
        driver.scheduler.submit(make_request(1, [1] * prompt, max_tokens))
    assert driver.scheduler.num_open == 0
    driver.submit(make_request(2, [1] * 20, 13))
    driver.run()
    assert len(driver.tokens[2]) == 13


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_two_long_requests_do_not_deadlock_on_partial_reservations(depth: int, prefix_cache: bool) -> None:
    """Fault 13: each fills the pool alone, and both have begun."""
    driver = Driver(limits(num_pages=8, prefix_cache=prefix_cache), depth)
    driver.submit(make_request(1, [1] * 8, 24))
    driver.submit(make_request(2, [2] * 8, 24))
    driver.run(max_steps=400)
    assert [len(driver.tokens[number]) for number in (1, 2)] == [24, 24]
    assert driver.scheduler.totals.preemptions >= 1


def test_two_very_long_prompts_do_not_retry_for_ever() -> None:
    """Fault 13: together they exceed the pool; one waits until the other has ended."""
    driver = Driver(limits(num_pages=8, prefix_cache=False))
    driver.submit(make_request(1, [1] * 28, 4))
    driver.submit(make_request(2, [2] * 28, 4))
    driver.run(max_steps=40)
    assert driver.scheduler.totals.preemptions == 0


def test_abort_in_mid_step_is_an_abort() -> None:
    """Fault 15: it must not count as a normal finish, whatever the step in flight brings."""
    expected = undisturbed([1, 2], make_request(1, [1, 2]).sampling, 8)
    driver = Driver(limits())
    driver.submit(make_request(1, [1, 2], stop_ids=[expected[0]]))
    driver.push()
    driver.abort(1)
    driver.run()
    assert driver.finishes[1].reason is Reason.ABORTED
    assert driver.tokens[1] == []


def test_late_and_repeated_aborts_do_nothing() -> None:
    """Fault 15: they must not wedge the engine."""
    driver = Driver(limits())
    driver.submit(make_request(1, [1], 2))
    driver.run()
    driver.abort(1)
    driver.submit(make_request(2, [1], 20))
    driver.advance()
    for number in (2, 2, 1, 99):
        driver.abort(number)
    driver.run()
    assert driver.finishes[1].reason is Reason.LENGTH
    assert driver.finishes[2].reason is Reason.ABORTED


def test_abort_of_a_preempted_request_gives_everything_back() -> None:
    driver = Driver(limits(num_pages=6, prefix_cache=False))
    driver.submit(make_request(1, [1] * 4, 18))
    driver.submit(make_request(2, [2] * 4, 18))
    driver.push()
    while driver.scheduler.num_running == 2:
        if len(driver.in_flight) == driver.depth:
            driver.pull()
        driver.push()
    assert driver.in_flight, "the victim's pages are still behind a fence"
    assert driver.scheduler.allocator.num_free == 0
    driver.abort(2)
    driver.run()
    assert driver.finishes[2].reason is Reason.ABORTED
    assert len(driver.tokens[1]) == 18


def test_deadlines_hold_in_the_queue_and_in_flight() -> None:
    driver = Driver(limits(max_running=1, max_step_tokens=8))
    driver.submit(make_request(1, [1], 40, deadline=2.0))
    driver.submit(make_request(2, [1], 40, deadline=1.0))
    driver.submit(make_request(3, [1], 4))
    driver.push()
    driver.now = 1.0
    driver.push()
    assert driver.finishes[2].reason is Reason.TIMEOUT
    assert driver.finishes[2].usage.queue_s == driver.finishes[2].usage.total_s == 1.0
    driver.now = 2.5
    driver.run()
    assert driver.finishes[1].reason is Reason.TIMEOUT
    assert driver.finishes[3].reason is Reason.LENGTH


def test_logits_without_a_finite_value_end_the_request_alone() -> None:
    driver = Driver(limits(), poison=[13])
    driver.submit(make_request(1, [1], 8, seed=13))
    driver.submit(make_request(2, [1], 8))
    driver.run()
    assert driver.finishes[1].reason is Reason.NUMERICAL_ERROR
    assert len(driver.tokens[1]) == 2
    assert len(driver.tokens[2]) == 8


def test_steps_are_collected_in_order() -> None:
    driver = Driver(limits())
    driver.submit(make_request(1, [1], 8))
    driver.push()
    driver.push()
    with pytest.raises(InternalError, match="step 2 is collected after step 0"):
        driver.scheduler.commit(driver.plans[1], [0], 0.0)


def test_the_books_are_checked_for_real() -> None:
    driver = Driver(limits())
    driver.submit(make_request(1, [1], 8))
    driver.push()
    next(iter(driver.scheduler._running)).pages.append(5)
    with pytest.raises(InternalError, match="KV page 5 has 0 references, its owners know of 1"):
        driver.scheduler.check()


def test_a_step_leaves_room_for_prefill() -> None:
    with pytest.raises(InvalidRequestError, match="max_step_tokens: 4, must be more than max_running"):
        Scheduler(Limits(num_pages=1, page_size=4, max_context=4, max_running=4, max_step_tokens=4))
