"""Who is taken on, who is refused, and with which delay."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmserve.service.identity import ANONYMOUS, Identity
from glmserve.service.pace import UNKNOWN, Pace
from glmserve.service.status import OverloadedError, PermissionDeniedError, UnavailableError
from router.dispatch.admission import Admission, AdmissionLimits
from router.dispatch.tenants import Tenants, TokenBucket
from router.dispatch.worker_pool import Outlook

NOBODY = Outlook(0.0, UNKNOWN, 0, UNKNOWN)
# 1000 prompt tokens a second, 100 tokens a second of 10 requests that generate 50 each: one ends every 0.5 s.
PACE = Pace(1000.0, 100.0, 50.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Harness:
    def __init__(self, **limits: float) -> None:
        self.clock = Clock()
        self.tenants = Tenants(self.clock)
        self.outlook = NOBODY
        given = {"max_requests": 10, "max_prompt_tokens": 100, "max_queue_s": 10.0, "retry_after_ms": 5, **limits}
        self.admission = Admission(AdmissionLimits(**given), self.tenants, lambda: self.outlook)  # type: ignore[arg-type]

    def busy(self, queue_s: float = 0.0) -> None:
        self.outlook = Outlook(queue_s, PACE, 10, PACE)

    def enter(self, identity: Identity = ANONYMOUS, priority: int = 0, deadline_s: float | None = None) -> object:
        return self.admission.enter(identity, priority, deadline_s)

    def refused(
        self, identity: Identity = ANONYMOUS, priority: int = 0, deadline_s: float | None = None
    ) -> OverloadedError:
        with pytest.raises(OverloadedError) as caught:
            self.enter(identity, priority, deadline_s)
        return caught.value


class TestAdmission:
    @pytest.mark.parametrize(("priority", "places"), [(-1, 5), (0, 9), (1, 10)])
    def test_a_class_fills_its_share_of_the_places(self, priority: int, places: int) -> None:
        harness = Harness()
        for _ in range(places):
            harness.enter(priority=priority)
        assert "at most" in str(harness.refused(priority=priority))

    def test_the_urgent_find_a_place_where_others_are_refused(self) -> None:
        harness = Harness()
        for _ in range(9):
            harness.enter()
        harness.refused()
        harness.enter(priority=5)

    def test_counts_go_back_to_zero(self) -> None:
        harness = Harness(max_requests=1, max_prompt_tokens=10)
        for _ in range(3):
            ticket = harness.admission.enter(ANONYMOUS, 0, None)
            ticket.add_prompt(11, 1, None)
            harness.refused()
            ticket.leave(5)
        assert len(harness.tenants) == 0

    def test_a_request_takes_a_place_for_each_choice(self) -> None:
        harness = Harness(max_requests=10)
        first = harness.admission.enter(ANONYMOUS, 0, None, 6)
        with pytest.raises(OverloadedError):
            harness.admission.enter(ANONYMOUS, 0, None, 4)
        harness.admission.enter(ANONYMOUS, 0, None, 3).leave(0)
        first.leave(0)
        harness.admission.enter(ANONYMOUS, 0, None, 9)
        harness.refused()

    def test_more_choices_than_there_are_places_are_taken_alone(self) -> None:
        harness = Harness(max_requests=2)
        ticket = harness.admission.enter(ANONYMOUS, 0, None, 16)
        harness.refused()
        ticket.leave(0)
        harness.enter()
        with pytest.raises(OverloadedError):
            harness.admission.enter(ANONYMOUS, 0, None, 16)

    def test_the_delay_is_the_configured_one_until_a_pace_is_known(self) -> None:
        harness = Harness(max_requests=1, retry_after_ms=777)
        harness.enter()
        assert harness.refused().retry_after_ms == 777
        harness.busy()
        assert 500 <= harness.refused().retry_after_ms <= 501, "one request ends in half a second"

    @pytest.mark.parametrize(("priority", "longest_s"), [(-1, 5.0), (0, 9.0), (1, 10.0)])
    def test_the_expected_wait_is_bounded_by_class(self, priority: int, longest_s: float) -> None:
        harness = Harness()
        harness.busy(longest_s)
        harness.enter(priority=priority)
        harness.busy(longest_s + 2.5)
        assert 2500 <= harness.refused(priority=priority).retry_after_ms <= 2501

    def test_a_deadline_that_the_queue_outlasts_is_refused_before_tokenising(self) -> None:
        harness = Harness()
        harness.busy(3.0)
        harness.enter(deadline_s=3.0)
        error = harness.refused(deadline_s=2.0)
        assert 1000 <= error.retry_after_ms <= 1001
        assert "deadline" in str(error)

    @pytest.mark.parametrize(
        ("prompt", "least", "deadline_s", "fits"),
        [(50, 1, 0.06, True), (50, 1, 0.04, False), (50, 11, 1.06, True), (50, 11, 1.04, False), (50, 1, None, True)],
    )
    def test_a_deadline_must_hold_prefill_and_the_least_decoding(
        self, prompt: int, least: int, deadline_s: float | None, fits: bool
    ) -> None:
        harness = Harness()
        harness.busy()
        ticket = harness.admission.enter(ANONYMOUS, 0, deadline_s)
        if fits:
            ticket.add_prompt(prompt, least, deadline_s)
        else:
            with pytest.raises(OverloadedError, match="the deadline is in"):
                ticket.add_prompt(prompt, least, deadline_s)

    def test_an_idle_worker_takes_what_its_old_pace_would_refuse(self) -> None:
        harness = Harness()
        harness.outlook = Outlook(0.0, PACE, 0, PACE)
        harness.admission.enter(ANONYMOUS, 0, 0.001).add_prompt(50, 1000, 0.001)

    @pytest.mark.parametrize(("tokens", "fits"), [(0, True), (30, True), (31, False)])
    def test_waiting_prompt_tokens_up_to_the_limit(self, tokens: int, fits: bool) -> None:
        harness = Harness()
        harness.busy()
        harness.admission.enter(ANONYMOUS, 0, None).add_prompt(60, 1, None)
        ticket = harness.admission.enter(ANONYMOUS, 0, None)
        if fits:
            ticket.add_prompt(tokens, 1, None)
        else:
            with pytest.raises(OverloadedError, match="60 prompt tokens wait, with 31 more they exceed 90") as caught:
                ticket.add_prompt(tokens, 1, None)
            assert caught.value.retry_after_ms == 10, "the time of one token, and at least 10 ms"

    def test_a_prompt_waits_no_longer_once_it_has_a_token(self) -> None:
        harness = Harness()
        first, second = (harness.admission.enter(ANONYMOUS, 0, None) for _ in range(2))
        first.add_prompt(90, 1, None)
        with pytest.raises(OverloadedError):
            second.add_prompt(1, 1, None)
        first.began()
        first.began()
        second.add_prompt(90, 1, None)
        first.leave(1)
        second.leave(1)
        harness.admission.enter(ANONYMOUS, 0, None).add_prompt(90, 1, None)

    async def test_closed_refuses_and_idle_comes_with_the_last(self) -> None:
        harness = Harness()
        ticket = harness.admission.enter(ANONYMOUS, 0, None)
        harness.admission.close()
        with pytest.raises(UnavailableError):
            harness.enter()
        waiting = asyncio.create_task(harness.admission.wait_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        ticket.leave(0)
        await waiting


class TestTenants:
    def test_one_callers_places_do_not_touch_anothers(self) -> None:
        harness = Harness()
        harness.busy()
        alice, bob = Identity("alice", max_requests=1), Identity("bob", max_requests=1)
        ticket = harness.admission.enter(alice, 0, None)
        error = harness.refused(alice)
        assert "alice has 1 requests in flight, at most 1" in str(error)
        assert 500 <= error.retry_after_ms <= 501
        harness.enter(bob)
        ticket.leave(0)
        harness.enter(alice)

    def test_choices_count_as_requests_of_the_caller(self) -> None:
        harness = Harness()
        alice = Identity("alice", max_requests=4)
        ticket = harness.admission.enter(alice, 0, None, 3)
        with pytest.raises(OverloadedError, match="alice has 3 requests in flight, at most 4"):
            harness.admission.enter(alice, 0, None, 2)
        with pytest.raises(PermissionDeniedError, match="5 choices are more than alice may have in flight: 4"):
            harness.admission.enter(alice, 0, None, 5)
        ticket.leave(0)
        harness.admission.enter(alice, 0, None, 4)

    def test_a_refused_caller_takes_no_place(self) -> None:
        harness = Harness(max_requests=2)
        alice = Identity("alice", max_requests=1)
        harness.enter(alice)
        for _ in range(5):
            harness.refused(alice)
        harness.enter()

    def test_priorities_are_bounded_by_the_key(self) -> None:
        harness = Harness()
        batch = Identity("batch", max_priority=-10)
        harness.enter(batch, priority=-10)
        with pytest.raises(PermissionDeniedError, match="priority: -9 is not allowed to batch; allowed: -100 to -10"):
            harness.enter(batch, priority=-9)

    def test_tokens_of_prompts_and_completions_are_paid_and_come_back_with_time(self) -> None:
        harness = Harness()
        alice = Identity("alice", tokens_per_minute=60)
        ticket = harness.admission.enter(alice, 0, None)
        ticket.add_prompt(40, 1, None)
        ticket.leave(30)
        error = harness.refused(alice)
        assert "alice has used its 60 tokens a minute" in str(error)
        assert 11_000 <= error.retry_after_ms <= 11_001, "10 tokens of debt and one to use, at one a second"
        harness.clock.now += 11
        ticket = harness.admission.enter(alice, 0, None)
        with pytest.raises(OverloadedError) as caught:
            ticket.add_prompt(11, 1, None)
        assert 10_000 <= caught.value.retry_after_ms <= 10_001
        ticket.leave(0)

    def test_idle_accounts_are_forgotten_and_owing_ones_are_not(self) -> None:
        harness = Harness()
        for number in range(100):
            harness.admission.enter(Identity(f"caller {number}", max_requests=1), 0, None).leave(0)
        assert len(harness.tenants) == 0
        ticket = harness.admission.enter(Identity("alice", tokens_per_minute=60), 0, None)
        ticket.leave(120)
        assert len(harness.tenants) == 1
        harness.clock.now += 120
        harness.enter(Identity("bob"))
        assert len(harness.tenants) == 1

    def test_new_limits_of_a_key_hold_from_its_next_request(self) -> None:
        harness = Harness()
        ticket = harness.admission.enter(Identity("alice", tokens_per_minute=10), 0, None)
        ticket.leave(1000)
        harness.refused(Identity("alice", tokens_per_minute=10))
        harness.enter(Identity("alice", tokens_per_minute=1000))

    @given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 500)), max_size=30), st.integers(1, 10_000))
    def test_a_bucket_never_gives_more_than_it_got(self, uses: list[tuple[float, int]], per_minute: int) -> None:
        now = spent = 0.0
        bucket = TokenBucket(per_minute, now)
        for seconds, tokens in uses:
            now += seconds
            wait_s = bucket.wait_s(tokens, now)
            if wait_s == 0 and tokens <= per_minute:
                bucket.take(tokens, now)
                spent += tokens
            else:
                assert bucket.wait_s(tokens, now + wait_s) <= 1e-6, "the delay is enough"
        assert spent <= per_minute * (1 + now / 60) + 1e-6


class TestPace:
    def test_unknown_takes_no_time(self) -> None:
        assert UNKNOWN.queue_s(free_places=0, waiting_requests=9, waiting_prompt_tokens=999) == 0
        assert UNKNOWN.prefill_s(10) == UNKNOWN.places_s(10) == UNKNOWN.decode_s(10, 1) == 0

    @pytest.mark.parametrize(
        ("free", "waiting", "tokens", "seconds"), [(1, 0, 0, 0.0), (1, 0, 500, 0.5), (0, 0, 0, 0.5), (0, 3, 500, 2.0)]
    )
    def test_the_longer_of_prompts_and_places(self, free: int, waiting: int, tokens: int, seconds: float) -> None:
        assert PACE.queue_s(free_places=free, waiting_requests=waiting, waiting_prompt_tokens=tokens) == seconds
