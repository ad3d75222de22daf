"""Random traces of submit, abort, time and memory pressure: nobody notices anybody else."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine_worker.scheduler.request import Reason, Request
from tests.unit.scheduler_driver import Driver, limits, make_request
from tests.unit.scripted_engine import undisturbed


@dataclass(frozen=True)
class Abort:
    number: int


@dataclass(frozen=True)
class Advance:
    times: int


@dataclass(frozen=True)
class Wait:
    seconds: float


Action = Request | Abort | Advance | Wait

POISON = (13,)


@st.composite
def traces(draw: st.DrawFn) -> tuple[Driver, list[Action]]:
    max_running = draw(st.integers(1, 4))
    num_pages = draw(st.integers(2, 12))
    sizes = limits(
        num_pages=num_pages,
        max_context=draw(st.integers(8, 48)),
        max_running=max_running,
        max_step_tokens=max_running + draw(st.integers(1, 12)),
        prefix_cache=draw(st.booleans()),
    )
    driver = Driver(sizes, draw(st.integers(1, 2)), POISON)
    longest = min(sizes.max_context, num_pages * sizes.page_size)
    actions: list[Action] = []
    for number in range(draw(st.integers(1, 8))):
        actions.append(draw(_requests(number, longest)))
        actions += draw(st.lists(_events(number), max_size=3))
    return driver, actions


@st.composite
def _requests(draw: st.DrawFn, number: int, longest: int) -> Request:
    # Prompts begin alike, so that they share pages.
    prompt = [draw(st.integers(0, 1))] * draw(st.integers(1, longest - 1))
    prompt[-1] = draw(st.integers(0, 3))
    max_tokens = draw(st.integers(1, longest - len(prompt)))
    seed = draw(st.sampled_from([0, 1, 2, *POISON]))
    stop_ids = draw(st.sets(st.integers(0, 49), max_size=6))
    request = make_request(
        number,
        prompt,
        max_tokens,
        stop_ids=sorted(stop_ids),
        min_tokens=draw(st.integers(0, max_tokens)),
        seed=seed,
        presence_penalty=draw(st.sampled_from([0.0, 1.0])),
        priority=draw(st.integers(-3, 3)),
        deadline=draw(st.sampled_from([None, None, None, 0.5, 2.0, 5.0])),
    )
    expected = undisturbed(prompt, request.sampling, max_tokens, frozenset(POISON))
    resumed = draw(st.integers(0, max(0, len(expected) - 1)))
    request.tokens.extend(expected[:resumed])
    return request


def _events(newest: int) -> st.SearchStrategy[Action]:
    return st.one_of(
        st.builds(Advance, st.integers(1, 12)),
        st.builds(Abort, st.integers(0, newest + 1)),
        st.builds(Wait, st.floats(0.1, 3)),
    )


@settings(max_examples=300, deadline=None)
@given(traces())
def test_any_trace(trace: tuple[Driver, list[Action]]) -> None:
    driver, actions = trace
    requests: list[Request] = []
    resumed: dict[int, list[int]] = {}
    for action in actions:
        match action:
            case Abort(number):
                driver.abort(number)
            case Advance(times):
                for _ in range(times):
                    driver.advance()
            case Wait(seconds):
                driver.now += seconds
            case request:
                request.arrival = driver.now
                requests.append(request)
                resumed[request.key[1]] = list(request.tokens[request.prompt_len :])
                driver.submit(request)
    driver.run()
    for request in requests:
        _check_end(driver, request, resumed[request.key[1]])
    event(f"preemptions: {min(3, driver.scheduler.totals.preemptions)}")
    event(f"cached: {driver.scheduler.totals.cached_prompt_tokens > 0}")


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_memory_pressure(data: st.DataObject) -> None:
    """Long answers, a pool for about one and a half: everybody still gets exactly the own answer."""
    num_requests = data.draw(st.integers(3, 6))
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    num_pages = data.draw(st.integers(16, 28)) // page_size
    sizes = limits(
        num_pages=num_pages,
        max_running=num_requests,
        max_step_tokens=16,
        page_size=page_size,
        prefix_cache=data.draw(st.booleans()),
    )
    driver = Driver(sizes, data.draw(st.sampled_from([2, 2, 1])))
    requests = []
    for number in range(num_requests):
        prompt = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 6))
        most = num_pages * sizes.page_size - len(prompt)
        max_tokens = data.draw(st.integers(1, 8) | st.integers(most // 2, most))
        requests.append(make_request(number, prompt, max_tokens, presence_penalty=1.0, seed=number % 2))
    for request in requests:
        driver.submit(request)
        for _ in range(data.draw(st.integers(0, 3))):
            driver.advance()
    driver.run()
    for request in requests:
        expected = undisturbed(request.tokens[: request.prompt_len], request.sampling, request.max_tokens)
        assert driver.tokens[request.key[1]] == expected
    assert driver.finishes[0].usage.preemptions == 0, "the oldest is never preempted"
    event(f"preemptions: {min(5, driver.scheduler.totals.preemptions)}")
    event(f"cached: {driver.scheduler.totals.cached_prompt_tokens > 0}")


def _check_end(driver: Driver, request: Request, resumed: list[int]) -> None:
    number = request.key[1]
    finish = driver.finishes[number]
    prompt = request.tokens[: request.prompt_len]
    expected = undisturbed(prompt, request.sampling, request.max_tokens, frozenset(POISON))
    got = resumed + driver.tokens[number]
    event(finish.reason.name)
    assert finish.usage.completion_tokens == len(got)
    match finish.reason:
        case Reason.STOP:
            assert got == expected
            assert finish.stop_token_id == got[-1]
        case Reason.LENGTH:
            assert got == expected
            assert len(got) == request.max_tokens
        case Reason.NUMERICAL_ERROR:
            assert got == expected
        case _:
            assert got == expected[: len(got)]
