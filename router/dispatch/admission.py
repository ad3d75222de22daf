"""How much the router takes on at once. Beyond it a request is refused at once, never queued here."""

from __future__ import annotations

import asyncio

from glmserve.service.status import OverloadedError, UnavailableError


class Admission:
    """Counts requests and prompt tokens in flight."""

    def __init__(self, max_requests: int, max_prompt_tokens: int, retry_after_ms: int) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._retry_after_ms = retry_after_ms
        self._requests = 0
        self._prompt_tokens = 0
        self.closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> Ticket:
        """Take a place. Raises OverloadedError: all are taken. Raises UnavailableError: closed."""
        if self.closed:
            raise UnavailableError("the router is shutting down; try another")
        if self._requests >= self._max_requests:
            raise OverloadedError(
                f"{self._requests} requests in flight, at most {self._max_requests}", self._retry_after_ms
            )
        self._requests += 1
        self._idle.clear()
        return Ticket(self)

    def close(self) -> None:
        """Refuse new requests from now on."""
        self.closed = True

    async def wait_idle(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()

    def add_prompt(self, tokens: int) -> None:
        """Count a prompt. One larger than the limit is taken when it is alone."""
        if self._prompt_tokens and self._prompt_tokens + tokens > self._max_prompt_tokens:
            raise OverloadedError(
                f"{self._prompt_tokens} prompt tokens in flight, at most {self._max_prompt_tokens}",
                self._retry_after_ms,
            )
        self._prompt_tokens += tokens

    def leave(self, prompt_tokens: int) -> None:
        """Give back a place and its prompt tokens."""
        self._requests -= 1
        self._prompt_tokens -= prompt_tokens
        if self._requests == 0:
            self._idle.set()


class Ticket:
    """One request's place, to be given back exactly once."""

    __slots__ = ("_admission", "_prompt_tokens")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._prompt_tokens = 0

    def add_prompt(self, tokens: int) -> None:
        """Count the prompt of this request. Raises OverloadedError: no room for it."""
        self._admission.add_prompt(tokens)
        self._prompt_tokens += tokens

    def leave(self) -> None:
        """Give the place back."""
        self._admission.leave(self._prompt_tokens)
