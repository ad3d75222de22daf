"""The bound on what waits: accepted requests that have never run."""

from __future__ import annotations

from typing import NamedTuple

from engine_worker.scheduler.request import RequestKey
from glmserve.service.pace import Pace

_MIN_RETRY_MS = 100
_MAX_RETRY_MS = 30_000
_SMOOTHING = 0.2


class _Entry(NamedTuple):
    prompt_tokens: int
    since: float


class Backlog:
    """Counts on the service's side, so that a refusal does not wait for the engine."""

    def __init__(self, max_requests: int, max_prompt_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._entries: dict[RequestKey, _Entry] = {}
        self._wait_s = 0.0
        self.prompt_tokens = 0

    def refusal(self, prompt_tokens: int) -> str | None:
        """Why there is no room for one more request, or None. An empty backlog has room for any."""
        if len(self._entries) >= self._max_requests:
            return f"{len(self._entries)} requests wait, at most {self._max_requests} may"
        if self._entries and self.prompt_tokens + prompt_tokens > self._max_prompt_tokens:
            return (
                f"{self.prompt_tokens} prompt tokens wait, with {prompt_tokens} more they would exceed "
                f"{self._max_prompt_tokens}"
            )
        return None

    def queue_s(self, pace: Pace, free_places: int, running_prompt_tokens: int) -> float:
        """How long a request that comes now will wait. `running_prompt_tokens`: not yet computed of what runs."""
        return pace.queue_s(
            free_places=free_places,
            waiting_requests=len(self._entries),
            waiting_prompt_tokens=self.prompt_tokens + running_prompt_tokens,
        )

    def retry_after_ms(self, queue_s: float) -> int:
        """By when what waits now has started: the estimate, or while there is none how long requests waited lately."""
        return min(_MAX_RETRY_MS, max(_MIN_RETRY_MS, int((queue_s or self._wait_s) * 1000)))

    def add(self, key: RequestKey, prompt_tokens: int, now: float) -> None:
        self._entries[key] = _Entry(prompt_tokens, now)
        self.prompt_tokens += prompt_tokens

    def started(self, key: RequestKey, now: float) -> None:
        """The request runs: it has left the backlog."""
        entry = self._entries.get(key)
        if entry is not None:
            self._wait_s += _SMOOTHING * (now - entry.since - self._wait_s)
            self.discard(key)

    def discard(self, key: RequestKey) -> None:
        """The request has ended, started or not."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.prompt_tokens -= entry.prompt_tokens

    def __len__(self) -> int:
        return len(self._entries)
