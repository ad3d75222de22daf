"""The scheduler's pages: sharing, eviction and preemption, one rule at a time."""

from __future__ import annotations

import pytest

from tests.unit.scheduler_driver import PAGE, Driver, limits, make_request, rows
from tests.unit.scripted_engine import undisturbed


def test_a_page_is_published_only_when_its_step_has_been_collected() -> None:
    """Fault 14: a page in the prefix cache before its K and V are there."""
    driver = Driver(limits(num_pages=16))
    prompt = [7] * (2 * PAGE + 1)
    driver.submit(make_request(1, prompt, 4))
    driver.push()
    driver.submit(make_request(2, prompt, 4))
    driver.push()
    assert rows(driver.plans[1])[2][0] == 0, "nothing is reused of a step in flight"
    driver.pull()
    driver.submit(make_request(3, prompt, 4))
    driver.push()
    assert rows(driver.plans[2])[3][0] == 2 * PAGE
    driver.run()
    assert driver.tokens[1] == driver.tokens[2] == driver.tokens[3]


def test_a_page_that_is_not_complete_is_never_shared() -> None:
    """Fault 14: the tail of an aborted prompt."""
    driver = Driver(limits())
    driver.submit(make_request(1, [7] * (PAGE + 2), 4))
    driver.push()
    driver.pull()
    driver.abort(1)
    driver.submit(make_request(2, [7] * (PAGE + 3), 4))
    driver.run()
    assert rows(driver.plans[-4])[2][0] == PAGE
    assert driver.scheduler.totals.cached_prompt_tokens == PAGE


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_the_last_prompt_token_is_always_computed(length: int) -> None:
    driver = Driver(limits())
    for number in (1, 2):
        driver.submit(make_request(number, [5] * length, 3))
        driver.run()
    assert driver.finishes[2].usage.cached_prompt_tokens == (length - 1) // PAGE * PAGE
    assert driver.tokens[1] == driver.tokens[2]


def test_twins_end_up_on_the_same_pages() -> None:
    driver = Driver(limits(num_pages=16))
    driver.submit(make_request(1, [7] * (3 * PAGE), 8))
    driver.submit(make_request(2, [7] * (3 * PAGE), 8))
    for _ in range(16):
        driver.advance()
    first, second = (request.pages for request in driver.scheduler._running)
    assert first[:3] == second[:3]
    driver.run()
    assert driver.tokens[1] == driver.tokens[2]


def test_a_twins_page_is_free_when_no_step_in_flight_can_read_it() -> None:
    driver = Driver(limits(num_pages=8))
    for number in (1, 2):
        driver.submit(make_request(number, [7] * (PAGE + 1), 3))
    driver.push()
    driver.push()
    driver.pull()
    assert driver.scheduler.allocator.num_free == 4, "one shared page, two own ones, one that step 2 may read"
    driver.pull()
    assert driver.scheduler.allocator.num_free == 5
    driver.run()


def test_a_twin_reads_the_shared_page_once_its_own_is_reused() -> None:
    driver = Driver(limits(num_pages=7), depth=1)
    for number in (1, 2):
        driver.submit(make_request(number, [7] * PAGE, 3 * PAGE))
    for _ in range(4):
        driver.advance()
    driver.submit(make_request(3, [8] * (PAGE + 1), 1))
    driver.run()
    (third,) = [chunk for plan in driver.plans for chunk in plan.chunks if chunk.request.key[1] == 3]
    assert third.rows == PAGE + 1
    expected = undisturbed([7] * PAGE, make_request(1, [7] * PAGE).sampling, 3 * PAGE)
    assert driver.tokens[1] == driver.tokens[2] == expected


def test_what_is_evicted_first_is_the_end_of_a_prefix() -> None:
    driver = Driver(limits(num_pages=4), depth=1)
    driver.submit(make_request(1, [7] * (3 * PAGE), 1))
    driver.run()
    driver.submit(make_request(2, [8] * (PAGE + 1), 1))
    driver.run()
    driver.submit(make_request(3, [7] * (3 * PAGE), 1))
    driver.run()
    assert driver.finishes[3].usage.cached_prompt_tokens == 2 * PAGE
    assert driver.tokens[3] == driver.tokens[1]


def test_an_end_in_the_step_that_a_victim_still_waits_for() -> None:
    """The victim's pages must outlive its rows of that step, though another request is given back meanwhile."""
    driver = Driver(limits(num_pages=6))
    driver.submit(make_request(1, [1] * PAGE, 5))
    for number in (2, 3):
        driver.submit(make_request(number, [number] * PAGE, 12))
    driver.run()
    assert driver.finishes[3].usage.preemptions >= 1
    for number, max_tokens in ((1, 5), (2, 12), (3, 12)):
        sampling = make_request(number, [number] * PAGE).sampling
        assert driver.tokens[number] == undisturbed([number] * PAGE, sampling, max_tokens)


def test_nobody_is_preempted_for_pages_that_are_about_to_come_back() -> None:
    driver = Driver(limits(num_pages=9, prefix_cache=False))
    for number in (1, 2, 3):
        driver.submit(make_request(number, [number] * (2 * PAGE), 3 * PAGE))
    while not driver.scheduler.totals.preemptions:
        driver.advance()
    assert driver.scheduler.num_running == 2
    driver.run()
