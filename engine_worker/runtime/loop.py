"""The engine thread: commands in, steps through the engine, batched results out."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from engine_worker.constraints.masks import MaskFiller
from engine_worker.errors import WorkerError
from engine_worker.metrics import LoadSnapshot
from engine_worker.rates import StepRates
from engine_worker.runtime.records import StepResult
from engine_worker.runtime.step import StepEngine, StepPacker, submit_step
from engine_worker.scheduler.request import Finish, Outputs, Reason, Request, RequestKey, StepPlan
from engine_worker.scheduler.scheduler import Scheduler

log = structlog.get_logger()

# How long the engine must have had nothing to do before the books are checked: a client that sends one request after
# the other does not wait for it.
_IDLE_BEFORE_CHECK_S = 0.05


class TokenLogprobs(NamedTuple):
    """Of one sampled token: its own log-probability, and those of the best, best first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class NewScores(NamedTuple):
    """Of the next tokens of a prompt, the first of which has none."""

    key: RequestKey
    logprobs: list[TokenLogprobs]


class NewToken(NamedTuple):
    key: RequestKey
    token_id: int
    logprobs: TokenLogprobs | None


class StepStats(NamedTuple):
    """One collected step. `gap_s`: since the step before was collected, which is what its decoding requests waited."""

    sequences: int
    decodes: int
    device_s: float
    gap_s: float


@dataclass(slots=True)
class LoopOutputs:
    """What happened since the last ones: at most one a step."""

    load: LoadSnapshot
    steps: list[StepStats] = field(default_factory=list)
    scores: list[NewScores] = field(default_factory=list)
    tokens: list[NewToken] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    started: list[RequestKey] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineLoop:
    """Runs `engine` on a thread of its own.

    `submit`, `abort` and `stop` may be called from any thread; `deliver` is called on the engine thread and must not
    block. After a failure of engine or scheduler every request is ended UNAVAILABLE and `failure` is set.
    """

    def __init__(
        self,
        engine: StepEngine,
        scheduler: Scheduler,
        packer: StepPacker,
        masks: MaskFiller,
        deliver: Callable[[LoopOutputs], None],
        *,
        max_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._packer = packer
        self._masks = masks
        self._deliver = deliver
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._commands: queue.SimpleQueue[_Submit | _Abort | _Stop] = queue.SimpleQueue()
        self._in_flight: deque[StepPlan] = deque()
        self._steps = 0
        self._masked = 0  # number of the newest plan whose masks the engine has
        self._rates = StepRates(scheduler.limits.max_step_tokens, scheduler.limits.max_running)
        self._busy_since: float | None = None
        self._collected_at = 0.0
        self._stopping = False
        self._outputs = LoopOutputs(self._load())
        self._thread = threading.Thread(target=self._run, name="engine-loop")

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._commands.put(_Submit(request))

    def abort(self, key: RequestKey) -> None:
        """Idempotent; unknown and finished keys are ignored."""
        self._commands.put(_Abort(key))

    def stop(self) -> None:
        """End every request UNAVAILABLE and the thread after the steps in flight. Blocks until it has ended."""
        self._commands.put(_Stop())
        self._thread.join()

    @property
    def step_age_s(self) -> float:
        """Seconds since the last sign of progress; 0 while there is nothing to do. May be read from any thread."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    # ---- the engine thread ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            while self._in_flight:
                self._set_masks()
                self._collect()
        except Exception as error:
            self._fail(error)
            while not self._stopping:
                self._refuse(self._commands.get())

    def _turn(self) -> None:
        """Take commands, submit what fits, collect one step, deliver."""
        self._take_commands()
        self._outputs.finishes += self._scheduler.expire(self._clock())
        while len(self._in_flight) < self._max_in_flight:
            plan = self._scheduler.schedule(self._clock())
            if plan is None:
                break
            submit_step(self._engine, self._packer, plan)
            self._in_flight.append(plan)
            self._outputs.started += [request.key for request in plan.bound if request.preemptions == 0]
        if self._in_flight:
            self._set_masks()
            # A step can take seconds: what is known before it is not held back.
            self._flush()
            self._collect()
        self._flush()

    def _take_commands(self) -> None:
        if self._idle:
            self._busy_since = None
            command = self._next_when_idle()
            self._busy_since = self._clock()
            self._execute(command)
        while True:
            try:
                self._execute(self._commands.get_nowait())
            except queue.Empty:
                return

    def _next_when_idle(self) -> _Submit | _Abort | _Stop:
        try:
            return self._commands.get(timeout=_IDLE_BEFORE_CHECK_S)
        except queue.Empty:
            self._scheduler.check()
            return self._commands.get()

    def _execute(self, command: _Submit | _Abort | _Stop) -> None:
        match command:
            case _Submit(request):
                self._scheduler.submit(request)
            case _Abort(key):
                finish = self._scheduler.abort(key, Reason.ABORTED, self._clock())
                self._outputs.finishes += [] if finish is None else [finish]
            case _Stop():
                self._stopping = True
                self._outputs.finishes += self._scheduler.abort_all(Reason.UNAVAILABLE, self._clock())

    def _set_masks(self) -> None:
        """Of the oldest step in flight, now that all tokens before it are known: it computes meanwhile."""
        plan = self._in_flight[0]
        requests = plan.constrained
        if not requests or plan.number == self._masked:
            return
        masks, broken = self._masks.fill(requests)
        self._engine.set_masks(masks)
        self._masked = plan.number
        for request, error in broken:
            log.warning("constraint_failed", stream=request.key[0], request_id=request.key[1], error=error)
            finish = self._scheduler.abort(request.key, Reason.CONSTRAINT_ERROR, self._clock())
            self._outputs.finishes += [] if finish is None else [finish]

    def _collect(self) -> None:
        result = self._engine.collect()
        plan = self._in_flight.popleft()
        now = self._clock()
        outputs = self._scheduler.commit(plan, result.token_ids.tolist(), now)
        self._steps += 1
        self._measure(plan, outputs, now)
        self._outputs.steps.append(_step_stats(plan, result.device_ns / 1e9, now - self._collected_at))
        self._collected_at = now
        self._outputs.scores += _new_scores(outputs, result)
        self._outputs.tokens += _new_tokens(outputs, result)
        self._outputs.finishes += outputs.finishes

    def _measure(self, plan: StepPlan, outputs: Outputs, now: float) -> None:
        if self._busy_since is not None:
            self._rates.step(plan, now - self._busy_since)
        self._busy_since = now
        for finish in outputs.finishes:
            self._rates.request(finish.usage.completion_tokens)

    @property
    def _idle(self) -> bool:
        return not self._scheduler.num_open and not self._in_flight

    def _flush(self) -> None:
        outputs = self._outputs
        if outputs.tokens or outputs.finishes or outputs.started or outputs.failure or self._idle:
            outputs.load = self._load()
            self._outputs = LoopOutputs(outputs.load)
            self._deliver(outputs)

    def _fail(self, error: Exception) -> None:
        text = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        self._busy_since = None
        log.error("engine_failed", error=text, exc_info=None if isinstance(error, WorkerError) else error)
        self._outputs.finishes += self._scheduler.abort_all(Reason.UNAVAILABLE, self._clock())
        self._outputs.failure = text
        self._flush()

    def _refuse(self, command: _Submit | _Abort | _Stop) -> None:
        """The engine has failed: a request that came too late for `_fail` ends here."""
        if isinstance(command, _Submit):
            self._outputs.finishes.append(command.request.finish(Reason.UNAVAILABLE, self._clock()))
            self._flush()
        self._stopping = isinstance(command, _Stop)

    def _load(self) -> LoadSnapshot:
        scheduler, totals = self._scheduler, self._scheduler.totals
        return LoadSnapshot(
            running_requests=scheduler.num_running,
            running_prompt_tokens=scheduler.unplanned_prompt_tokens,
            total_pages=scheduler.allocator.num_pages,
            free_pages=scheduler.allocator.num_free,
            cached_pages=scheduler.allocator.num_cached,
            steps=self._steps,
            generated_tokens=totals.generated_tokens,
            prompt_tokens=totals.prompt_tokens,
            cached_prompt_tokens=totals.cached_prompt_tokens,
            preemptions=totals.preemptions,
            pace=self._rates.pace,
        )


def _step_stats(plan: StepPlan, device_s: float, gap_s: float) -> StepStats:
    decodes = sum(1 for chunk in plan.chunks if chunk.rows == 1 and chunk.start >= chunk.request.prompt_len)
    return StepStats(len(plan.chunks), decodes, device_s, gap_s)


def _new_scores(outputs: Outputs, result: StepResult) -> list[NewScores]:
    return [
        NewScores(
            request.key,
            [_logprobs(request.num_prompt_logprobs, each, result) for each in range(sample, sample + count)],
        )
        for request, sample, count in outputs.scores
    ]


def _new_tokens(outputs: Outputs, result: StepResult) -> list[NewToken]:
    return [
        NewToken(
            request.key,
            token,
            None if request.sampling.num_logprobs < 0 else _logprobs(request.sampling.num_logprobs, sample, result),
        )
        for request, token, sample in outputs.tokens
    ]


def _logprobs(count: int, sample: int, result: StepResult) -> TokenLogprobs:
    return TokenLogprobs(
        float(result.logprobs[sample]),
        result.top_ids[sample, :count].tolist(),
        result.top_logprobs[sample, :count].tolist(),
    )
