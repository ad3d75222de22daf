"""How long a client may take for a response."""

from __future__ import annotations

import asyncio

import structlog

log = structlog.get_logger()


class StallWatch:
    """Cancels the task of a call when a response waits for its client too long.

    A client that never reads would keep its place for ever: it answers pings, so its connection lives. One timer a
    call, set again when it finds the client in time, because a timer for each message is dear.
    """

    def __init__(self, limit_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self._since: float | None = None
        self._timer = self._loop.call_later(limit_s, self._look)

    def sending(self) -> float:
        """A response waits from now on. Returns the time."""
        self._since = now = self.now()
        return now

    def sent(self) -> None:
        """The client has taken it."""
        self._since = None

    def close(self) -> None:
        """The call is over."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self.now()
        since = now if self._since is None else self._since
        if now - since >= self._limit_s:
            log.warning("client_stalled", limit_s=self._limit_s)
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(since + self._limit_s, self._look)
