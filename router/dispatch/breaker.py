"""Keeps requests from a worker that fails them, though it says that it serves."""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES_TO_OPEN = 5
_MIN_OPEN_S = 1.0
_MAX_OPEN_S = 60.0


class Breaker:
    """Closed: requests pass. Open: none does, for a time that doubles. Then one may try, and its outcome decides.

    Only what is the worker's fault is a failure: UNAVAILABLE, INTERNAL, a lost link, a missed heartbeat. What a client
    did wrong, cancelled or ran out of time for, and a full queue, say nothing of the worker and are not told here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._open_s = _MIN_OPEN_S
        self._open_until: float | None = None
        self._trying = False

    @property
    def passes(self) -> bool:
        """Whether a request may go to the worker now."""
        if self._open_until is None:
            return True
        return not self._trying and self._clock() >= self._open_until

    @property
    def reopens_in_s(self) -> float:
        """Seconds until it may be tried again; 0 when it may."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def began(self) -> None:
        """A request went to the worker."""
        self._trying = self._open_until is not None

    def neutral(self) -> None:
        """It ended in a way that says nothing of the worker."""
        self._trying = False

    def succeeded(self) -> None:
        """The worker did what it should."""
        self._failures = 0
        self._open_s = _MIN_OPEN_S
        self._open_until = None
        self._trying = False

    def failed(self) -> None:
        """The worker's fault."""
        self._failures += 1
        if self._trying or (self._open_until is None and self._failures >= FAILURES_TO_OPEN):
            self._open_until = self._clock() + self._open_s
            self._open_s = min(self._open_s * 2, _MAX_OPEN_S)
        self._trying = False
