"""What the engine achieves: measured on its steps, smoothed."""

from __future__ import annotations

from engine_worker.scheduler.request import StepPlan
from glmserve.service.pace import Pace

_SMOOTHING = 0.1


class _Rate:
    """Tokens a second over about the last 1 / _SMOOTHING steps, each weighing by its time."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens += _SMOOTHING * (tokens - self._tokens)
        self._seconds += _SMOOTHING * (seconds - self._seconds)

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class StepRates:
    """Only steps that are at least half full count: a small step says nothing of what the engine is able to do."""

    def __init__(self, max_step_tokens: int, max_running: int) -> None:
        self._enough_rows = max_step_tokens / 2
        self._enough_samples = max_running / 2
        self._prefill = _Rate()
        self._decode = _Rate()
        self._requests = 0
        self._tokens_per_request = 0.0

    def step(self, plan: StepPlan, seconds: float) -> None:
        """A step took `seconds`."""
        rows = sum(chunk.rows for chunk in plan.chunks if chunk.rows > 1)
        samples = sum(chunk.samples for chunk in plan.chunks)
        if rows >= self._enough_rows:
            self._prefill.add(rows, seconds)
        if samples >= self._enough_samples:
            self._decode.add(samples, seconds)

    def request(self, completion_tokens: int) -> None:
        """A request ended."""
        if completion_tokens:
            self._requests += 1
            # A plain mean at first: the warm-up, which comes before all others, is no measure of them.
            weight = max(_SMOOTHING, 1 / self._requests)
            self._tokens_per_request += weight * (completion_tokens - self._tokens_per_request)

    @property
    def pace(self) -> Pace:
        return Pace(self._prefill.value, self._decode.value, self._tokens_per_request)
