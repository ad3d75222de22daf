"""Continuous batching: which rows run in the next step.

Requests are ranked once, at submit: first come, first served, where one step of priority weighs as much as `aging_s` of
waiting; so nobody is overtaken for ever. Steps are planned before the tokens of earlier ones are known. Whatever a step
in flight may touch is given back when that step is collected, not before.

Why it never deadlocks: a request is admitted with all pages for the tokens it has, and grows by one page at a time; a
request that finds no page preempts the lowest rank, or waits if it is the lowest itself; and the pool holds any one
request. So the highest rank always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_worker.errors import InternalError, InvalidRequestError
from engine_worker.scheduler.kv_allocator import KvAllocator
from engine_worker.scheduler.limits import Limits
from engine_worker.scheduler.ordered import Ordered
from engine_worker.scheduler.request import (
    Chunk,
    Finish,
    Outputs,
    Reason,
    Request,
    RequestKey,
    ScoreOutput,
    State,
    StepPlan,
    TokenOutput,
)


@dataclass(slots=True)
class Totals:
    """Since start."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class _Fence:
    """To be given back once step `number` is collected: a request's slot and pages, or one page."""

    number: int
    request: Request | None = None
    page: int = -1


class Scheduler:
    """Owns every request from submit to finish. One thread; time comes in as seconds of one monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        if limits.max_step_tokens <= limits.max_running:
            raise InvalidRequestError(
                f"max_step_tokens: {limits.max_step_tokens}, must be more than max_running ({limits.max_running})"
            )
        self.limits = limits
        self.totals = Totals()
        self.allocator = KvAllocator(limits.num_pages)
        self._requests: dict[RequestKey, Request] = {}
        self._waiting: Ordered[Request] = Ordered(key=lambda request: request.rank)
        self._running: Ordered[Request] = Ordered(key=lambda request: request.rank)
        self._deadlines: Ordered[Request] = Ordered(key=lambda request: (request.deadline, request.rank[1]))
        self._slots = list(range(limits.max_running - 1, -1, -1))
        self._released_slots: list[int] = []
        self._fences: deque[_Fence] = deque()
        self._submitted = 0
        self._committed = 0
        self._arrivals = 0
        # Prompt tokens of running requests that are in no step yet.
        self.unplanned_prompt_tokens = 0
        # The last admission that failed: request, available pages, running requests. Until one changes it fails again.
        self._blocked: tuple[Request, int, int] | None = None

    # ---- requests come and go ----

    def submit(self, request: Request) -> None:
        """Queue `request`. Raises InvalidRequestError if it could never run; then nothing is kept of it."""
        self.limits.refuse_impossible(request.prompt_len, request.max_tokens)
        self._arrivals += 1
        first_seen = request.arrival - request.age_s
        request.rank = (first_seen - request.priority * self.limits.aging_s, self._arrivals)
        self._requests[request.key] = request
        self._waiting.add(request)
        if request.deadline is not None:
            self._deadlines.add(request)

    def abort(self, key: RequestKey, reason: Reason, now: float) -> Finish | None:
        """End a request, whatever it is doing. None if the key is unknown, as it is after the end."""
        request = self._requests.get(key)
        return None if request is None else self._end(request, reason, now)

    def abort_all(self, reason: Reason, now: float) -> list[Finish]:
        """End every request."""
        return [self._end(request, reason, now) for request in list(self._requests.values())]

    def expire(self, now: float) -> list[Finish]:
        """End the requests whose deadline has passed."""
        finishes = []
        while len(self._deadlines) and (self._deadlines.first.deadline or 0.0) <= now:
            finishes.append(self._end(self._deadlines.first, Reason.TIMEOUT, now))
        return finishes

    # ---- steps ----

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, which the caller then must submit. None if no request has a row to compute now."""
        plan = StepPlan(self._submitted + 1, self._released_slots)
        prefills = self._schedule_decodes(plan)
        budget = self.limits.max_step_tokens - len(plan.chunks)
        for request in prefills:
            budget -= self._add_chunk(plan, request, min(request.remaining, budget))
        while budget and self._has_sample(plan) and (admitted := self._admit(now)) is not None:
            plan.bound.append(admitted)
            budget -= self._add_chunk(plan, admitted, min(admitted.remaining, budget))
        self.unplanned_prompt_tokens = sum(len(each.tokens) - each.scheduled for each in (*prefills, *plan.bound))
        if not plan.chunks:
            if self._requests and not self.in_flight:
                raise InternalError(f"scheduler is stuck with {len(self._requests)} open requests")
            return None
        self._released_slots = []
        self._submitted += 1
        return plan

    def commit(self, plan: StepPlan, token_ids: Sequence[int], now: float) -> Outputs:
        """Take in the oldest step in flight: a token for each sample; -1: no logit was finite."""
        if plan.number != self._committed + 1:
            raise InternalError(f"step {plan.number} is collected after step {self._committed}")
        outputs = Outputs()
        sample = 0
        for chunk in plan.chunks:
            request = chunk.request
            if request.state is not State.ENDED:
                request.computed = chunk.start + chunk.rows
                self._publish(request)
                if chunk.scores:
                    outputs.scores.append(ScoreOutput(request, sample, chunk.scores))
                if chunk.samples:
                    last = sample + chunk.scores
                    self._take_token(request, token_ids[last], last, outputs, now)
            sample += chunk.scores + chunk.samples
        # Only now: a victim's rows of this step may come after the end of another request.
        self._committed += 1
        self._pass_fences()
        return outputs

    @property
    def in_flight(self) -> int:
        """Steps planned and not yet committed."""
        return self._submitted - self._committed

    # ---- what others may know ----

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check(self) -> None:
        """Raises InternalError if pages, slots and requests do not add up."""
        owners = {id(request): request for request in (*self._requests.values(), *self._fenced_requests())}
        pages = [page for request in owners.values() for page in request.pages]
        self.allocator.check([*pages, *(fence.page for fence in self._fences if fence.request is None)])
        slots = [request.slot for request in owners.values() if request.slot >= 0]
        if sorted([*slots, *self._slots]) != list(range(self.limits.max_running)):
            raise InternalError(f"slots do not add up: held {sorted(slots)}, free {sorted(self._slots)}")
        listed = len(self._waiting) + len(self._running)
        preempted = sum(1 for request in self._requests.values() if request.state is State.PREEMPTED)
        if listed + preempted != len(self._requests):
            raise InternalError(f"{len(self._requests)} requests are open, {listed} listed and {preempted} preempted")

    # ---- scheduling ----

    def _schedule_decodes(self, plan: StepPlan) -> list[Request]:
        """Add every running request that lacks one row. Returns those that lack more."""
        prefills = []
        for request in list(self._running):
            if request.state is not State.RUNNING:
                continue  # preempted a moment ago, by a higher rank
            remaining = request.remaining
            if remaining > 1:
                prefills.append(request)
            elif remaining and self._grow(request):
                self._add_chunk(plan, request, 1)
        return prefills

    def _grow(self, request: Request) -> bool:
        """See to it that the request has a page for its next row."""
        if request.scheduled < len(request.pages) * self.limits.page_size:
            return True
        while (pages := self.allocator.allocate(1)) is None:
            # Pages behind a fence come back by themselves: preempt nobody meanwhile.
            victim = self._running.last
            if self._fenced_requests() or victim is request:
                return False
            self._preempt(victim)
        request.new_pages.append(len(request.pages))
        request.pages += pages
        return True

    def _add_chunk(self, plan: StepPlan, request: Request, rows: int) -> int:
        if request.is_unscored:
            rows = min(rows, self._sample_room(plan, request))
        if not rows:
            return 0
        samples = request.scheduled + rows == request.length
        plan.chunks.append(Chunk(request, request.scheduled, rows, samples, _add_scores(request, rows)))
        for index in request.new_pages:
            plan.page_updates.append((request.slot, index, request.pages[index]))
        if request.new_pages:
            request.new_pages.clear()
        request.scheduled += rows
        request.pending += samples
        return rows

    def _has_sample(self, plan: StepPlan) -> bool:
        return plan.num_samples < self.limits.max_running

    def _sample_room(self, plan: StepPlan, request: Request) -> int:
        """Samples of a step that `request` may have, 1 or more: every other running request may yet take one.

        Half of them at most, so that others are admitted beside it.
        """
        planned = {id(chunk.request) for chunk in plan.chunks}
        others = sum(1 for each in self._running if each is not request and id(each) not in planned)
        room = self.limits.max_running - plan.num_samples - others
        return min(room, max(1, self.limits.max_running // 2))

    def _admit(self, now: float) -> Request | None:
        """Start the first waiting request, given a slot, pages for its tokens, and one more for each that runs."""
        if not len(self._waiting) or not self._slots:
            return None
        request = self._waiting.first
        situation = (request, self.allocator.num_available, len(self._running))
        if self._blocked == situation:
            return None
        matched = self._matching_pages(request)
        needed = -(-len(request.tokens) // self.limits.page_size) - len(matched)
        revived = sum(1 for page in matched if self.allocator.references(page) == 0)
        if needed + revived + len(self._running) > self.allocator.num_available:
            self._blocked = situation
            return None
        for page in matched:
            self.allocator.hold(page)
        self._start(request, matched, self.allocator.allocate(needed) or [], now)
        return request

    def _start(self, request: Request, matched: list[int], fresh: list[int], now: float) -> None:
        self._waiting.remove(request)
        self._running.add(request)
        request.state = State.RUNNING
        request.slot = self._slots.pop()
        request.pages = matched + fresh
        request.new_pages = list(range(len(request.pages)))
        request.published = len(matched)
        request.scheduled = request.computed = len(matched) * self.limits.page_size
        if request.started is None:
            request.started = now
            request.cached_prompt_tokens = min(request.scheduled, request.prompt_len)
            self.totals.prompt_tokens += request.prompt_len
            self.totals.cached_prompt_tokens += request.cached_prompt_tokens

    def _matching_pages(self, request: Request) -> list[int]:
        """Published pages of the request's history, short of its last token: that one is computed, for its logits."""
        pages: list[int] = []
        if self.limits.prefix_cache and not request.is_unscored:
            for index in range((len(request.tokens) - 1) // self.limits.page_size):
                page = self.allocator.lookup(request.digest(index, self.limits.page_size))
                if page is None:
                    break
                pages.append(page)
        return pages

    # ---- results ----

    def _take_token(self, request: Request, token: int, sample: int, outputs: Outputs, now: float) -> None:
        request.pending -= 1
        if token < 0:
            outputs.finishes.append(self._end(request, Reason.NUMERICAL_ERROR, now))
            return
        request.tokens.append(token)
        if request.first_token is None:
            request.first_token = now
        self.totals.generated_tokens += 1
        outputs.tokens.append(TokenOutput(request, token, sample))
        if token in request.stop_ids:
            outputs.finishes.append(self._end(request, Reason.STOP, now))
        elif len(request.tokens) == request.max_length:
            outputs.finishes.append(self._end(request, Reason.LENGTH, now))

    def _publish(self, request: Request) -> None:
        """Name the pages that the committed rows completed; one whose name is taken gives way to the bearer of it."""
        if not self.limits.prefix_cache:
            return
        while (request.published + 1) * self.limits.page_size <= request.computed:
            index = request.published
            own = request.pages[index]
            page = self.allocator.publish(own, request.digest(index, self.limits.page_size))
            if page != own:
                request.pages[index] = page
                request.new_pages.append(index)
                self._fences.append(_Fence(self._submitted, page=own))
            request.published += 1

    # ---- giving back ----

    def _end(self, request: Request, reason: Reason, now: float) -> Finish:
        del self._requests[request.key]
        if request.deadline is not None:
            self._deadlines.remove(request)
        state, request.state = request.state, State.ENDED
        if state is State.WAITING:
            self._waiting.remove(request)
        elif state is State.RUNNING:
            self._running.remove(request)
            self._retire(request)
        return request.finish(reason, now)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        request.state = State.PREEMPTED
        self._retire(request)

    def _retire(self, request: Request) -> None:
        self._fences.append(_Fence(self._submitted, request))
        self._pass_fences()

    def _pass_fences(self) -> None:
        while self._fences and self._fences[0].number <= self._committed:
            fence = self._fences.popleft()
            if fence.request is None:
                self.allocator.release([fence.page])
            else:
                self._give_back(fence.request)

    def _give_back(self, request: Request) -> None:
        self.allocator.release(reversed(request.pages))
        self._slots.append(request.slot)
        self._released_slots.append(request.slot)
        request.pages, request.new_pages, request.slot = [], [], -1
        if request.state is State.PREEMPTED:
            request.state = State.WAITING
            request.preemptions += 1
            self.totals.preemptions += 1
            self._waiting.add(request)

    def _fenced_requests(self) -> Iterable[Request]:
        return [fence.request for fence in self._fences if fence.request is not None]


def _add_scores(request: Request, rows: int) -> int:
    """How many of the next `rows` bring log-probabilities of the prompt: each position does so once."""
    if not request.is_unscored:
        return 0
    end = min(request.scheduled + rows, request.prompt_len - 1)
    count = max(0, end - max(request.scheduled, request.scored))
    request.scored = max(request.scored, end)
    return count
