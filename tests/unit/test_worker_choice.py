"""Which worker gets a request: affinity, bounded loads, breakers, and where addresses come from."""

from __future__ import annotations

import asyncio
import math
import socket
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.dispatch.affinity import AFFINITY_PAGES, LOAD_BOUND, Candidate, choose, prefix_key
from router.dispatch.breaker import FAILURES_TO_OPEN, Breaker
from router.dispatch.discovery import resolve
from router.dispatch.signal import Signal

PAGE = 16
keys = st.binary(min_size=32, max_size=32)
loads = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 200)), min_size=1, max_size=8)


def candidates(made: list[tuple[int, int]]) -> list[Candidate]:
    return [Candidate(f"10.0.0.{number}:1", *sizes) for number, sizes in enumerate(made)]


class TestAffinity:
    @given(keys, loads)
    def test_nobody_gets_more_than_its_bound(self, key: bytes, made: list[tuple[int, int]]) -> None:
        workers = candidates(made)
        chosen = choose(key, workers)
        places = sum(max(1, worker.places) for worker in workers)
        everything = sum(worker.open_requests for worker in workers) + 1
        share = everything * max(1, chosen.places) / places
        assert chosen.open_requests + 1 <= math.ceil(LOAD_BOUND * share)

    @given(keys, st.integers(2, 8), st.data())
    def test_a_worker_that_goes_moves_only_its_own_prompts(self, key: bytes, count: int, data: Any) -> None:
        workers = candidates([(64, 0)] * count)
        chosen = choose(key, workers)
        assert choose(key, data.draw(st.permutations(workers))) == chosen, "the order does not matter"
        gone = data.draw(st.sampled_from([worker for worker in workers if worker != chosen]))
        assert choose(key, [worker for worker in workers if worker != gone]) == chosen

    def test_keys_are_spread_by_places(self) -> None:
        workers = candidates([(64, 0), (192, 0)])
        counts = Counter(choose(number.to_bytes(32), workers).name for number in range(4000))
        assert 2800 < counts["10.0.0.1:1"] < 3200

    def test_the_next_in_rank_takes_over_when_the_first_is_busier_than_its_share(self) -> None:
        key = b"k" * 32
        first = choose(key, candidates([(64, 0), (64, 0), (64, 0)]))
        second = choose(key, [worker for worker in candidates([(64, 0)] * 3) if worker.name != first.name])
        busy = [
            worker._replace(open_requests=30 if worker.name == first.name else 10)
            for worker in candidates([(64, 0)] * 3)
        ]
        assert choose(key, busy).name == second.name

    def test_without_a_complete_page_the_least_loaded_for_its_size(self) -> None:
        assert prefix_key(range(PAGE - 1), PAGE) is None
        assert choose(None, candidates([(10, 5), (100, 20), (10, 3)])).name == "10.0.0.1:1"

    def test_the_key_is_of_the_first_pages(self) -> None:
        prompt = list(range(PAGE * (AFFINITY_PAGES + 2)))
        key = prefix_key(prompt, PAGE)
        assert key == prefix_key([*prompt[: PAGE * AFFINITY_PAGES], 7, 7], PAGE)
        assert key != prefix_key([9, *prompt[1:]], PAGE)
        assert prefix_key(prompt[: PAGE + 3], PAGE) == prefix_key(prompt[:PAGE], PAGE)


class BreakerMachine(RuleBasedStateMachine):
    """A breaker beside a model of it: when it opened last, for how long, and whether a trial runs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(lambda: self.now)
        self.in_a_row = 0
        self.opened: float | None = None
        self.trial = False

    @precondition(lambda self: self.breaker.passes)
    @rule()
    def begin(self) -> None:
        self.breaker.began()
        self.trial = self.opened is not None

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def succeed(self) -> None:
        self.breaker.succeeded()
        self.in_a_row, self.opened, self.trial = 0, None, False

    @rule()
    def misuse(self) -> None:
        """A client's error, a cancel, a deadline, a full queue."""
        self.breaker.neutral()
        self.trial = False

    @rule()
    def fail(self) -> None:
        self.breaker.failed()
        self.in_a_row += 1
        if self.trial or (self.opened is None and self.in_a_row >= FAILURES_TO_OPEN):
            self.opened = self.now
        self.trial = False

    @invariant()
    def passes_only_while_closed_or_for_one_trial(self) -> None:
        if self.opened is None:
            assert self.breaker.passes
        elif self.trial or self.now < self.opened + 1.0:
            assert not self.breaker.passes
        elif self.now > self.opened + 60.0:
            assert self.breaker.passes
        assert 0 <= self.breaker.reopens_in_s <= 60


TestBreaker = BreakerMachine.TestCase


def test_a_breaker_stays_open_longer_each_time() -> None:
    now = 0.0
    breaker = Breaker(lambda: now)
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.passes
        breaker.failed()
    lengths = []
    for _ in range(8):
        assert not breaker.passes
        lengths.append(breaker.reopens_in_s)
        now += breaker.reopens_in_s
        breaker.began()
        assert not breaker.passes, "one trial at a time"
        breaker.failed()
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60]


class TestDiscovery:
    async def test_an_address_stands_for_itself(self) -> None:
        assert await resolve("10.0.0.1:50061") == {"10.0.0.1:50061"}

    async def test_a_name_stands_for_all_its_addresses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def lookup(host: str, port: int, *, type: int) -> list[Any]:
            assert (host, port, type) == ("workers.svc", 50061, socket.SOCK_STREAM)
            return [(0, 0, 0, "", (address, port)) for address in ("10.0.0.1", "10.0.0.2", "fd00::1")]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup, raising=False)
        assert await resolve("dns:///workers.svc:50061") == {"10.0.0.1:50061", "10.0.0.2:50061", "[fd00::1]:50061"}

    async def test_a_name_without_addresses_is_an_os_error(self) -> None:
        with pytest.raises(OSError):
            await resolve("dns:///no-such-host.invalid:1")


class TestSignal:
    async def test_what_fired_before_the_wait_is_not_missed(self) -> None:
        signal = Signal()
        seen = signal.count
        signal.fire()
        await signal.wait_beyond(seen)

    async def test_everybody_is_woken_and_a_cancelled_waiter_is_forgotten(self) -> None:
        signal = Signal()
        waiters = [asyncio.create_task(signal.wait_beyond(signal.count)) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        signal.fire()
        await asyncio.gather(*waiters[1:])
        assert not signal._waiters
