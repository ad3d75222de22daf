"""Runs a scheduler against the scripted engine and keeps account of what happened to each request."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from engine_worker.runtime.records import Sampling
from engine_worker.runtime.step import StepPacker, submit_step
from engine_worker.scheduler.limits import Limits
from engine_worker.scheduler.request import Finish, Outputs, Reason, Request, StepPlan
from engine_worker.scheduler.scheduler import Scheduler
from tests.unit.scripted_engine import ScriptedEngine

PAGE = 4


def limits(
    *,
    num_pages: int = 16,
    max_context: int = 64,
    max_running: int = 4,
    max_step_tokens: int = 12,
    page_size: int = PAGE,
    prefix_cache: bool = True,
) -> Limits:
    return Limits(
        num_pages=num_pages,
        page_size=page_size,
        max_context=max_context,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        prefix_cache=prefix_cache,
    )


def make_request(
    number: int,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    generated: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    seed: int = 0,
    presence_penalty: float = 0.0,
    priority: int = 0,
    arrival: float = 0.0,
    deadline: float | None = None,
    num_logprobs: int = -1,
    num_prompt_logprobs: int = -1,
) -> Request:
    sampling = Sampling(
        seed=seed,
        presence_penalty=presence_penalty,
        prompt_len=len(prompt),
        min_tokens=min_tokens,
        stop_ids=tuple(stop_ids),
        num_logprobs=num_logprobs,
    )
    return Request(
        key=(1, number),
        tokens=array("i", (*prompt, *generated)),
        prompt_len=len(prompt),
        max_tokens=max_tokens,
        stop_ids=frozenset(stop_ids),
        sampling=sampling,
        priority=priority,
        arrival=arrival,
        deadline=deadline,
        num_prompt_logprobs=num_prompt_logprobs,
    )


class Driver:
    """`depth`: steps in flight, at most. Checks the books after every event."""

    def __init__(self, limits: Limits, depth: int = 2, poison: Sequence[int] = ()) -> None:
        self.scheduler = Scheduler(limits)
        self.engine = ScriptedEngine(limits.num_pages, limits.page_size, poison)
        self.packer = StepPacker(limits.max_step_tokens, limits.max_running, -(-limits.max_context // limits.page_size))
        self.depth = depth
        self.in_flight: deque[StepPlan] = deque()
        self.tokens: dict[int, list[int]] = {}
        # Prompt tokens whose log-probabilities came.
        self.scored: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.plans: list[StepPlan] = []
        self.now = 0.0

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.tokens[request.key[1]] = []
        self.scheduler.check()

    def abort(self, number: int) -> None:
        finish = self.scheduler.abort((1, number), Reason.ABORTED, self.now)
        self._note([] if finish is None else [finish])

    def advance(self) -> bool:
        """Submit one step if one can be, else collect one. False if there was neither."""
        if len(self.in_flight) < self.depth and self.push():
            return True
        if self.in_flight:
            self.pull()
            return True
        return False

    def push(self) -> bool:
        self._note(self.scheduler.expire(self.now))
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        if plan is None:
            return False
        limits = self.scheduler.limits
        assert 0 < sum(chunk.rows for chunk in plan.chunks) <= limits.max_step_tokens
        assert len(plan.chunks) <= limits.max_running
        assert plan.num_samples <= limits.max_running
        submit_step(self.engine, self.packer, plan)
        self.in_flight.append(plan)
        self.plans.append(plan)
        return True

    def pull(self) -> Outputs:
        result = self.engine.collect()
        outputs = self.scheduler.commit(self.in_flight.popleft(), result.token_ids.tolist(), self.now)
        for request, sample, count in outputs.scores:
            assert request.key[1] not in self.finishes, "log-probabilities after the end"
            self.scored.setdefault(request.key[1], []).extend(result.token_ids[sample : sample + count].tolist())
        for request, token, _ in outputs.tokens:
            assert request.key[1] not in self.finishes, "a token after the end"
            self.tokens[request.key[1]].append(token)
        self._note(outputs.finishes)
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.advance():
                break
        else:
            raise AssertionError(f"{self.scheduler.num_open} requests have not ended after {max_steps} steps")
        assert self.scheduler.num_open == 0
        assert self.scheduler.allocator.num_available == self.scheduler.limits.num_pages
        assert set(self.finishes) == set(self.tokens)

    def _note(self, finishes: Sequence[Finish]) -> None:
        for finish in finishes:
            assert finish.key[1] not in self.finishes, "a request ended twice"
            self.finishes[finish.key[1]] = finish
        self.scheduler.check()


def rows(plan: StepPlan) -> dict[int, tuple[int, int, bool]]:
    """Of each request in a step, by its number: first position, rows, whether the last row is sampled."""
    return {chunk.request.key[1]: (chunk.start, chunk.rows, chunk.samples) for chunk in plan.chunks}
