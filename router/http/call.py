"""One HTTP request as the core knows a call (`router.call.Call`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from glmserve.service.identity import Identity
from glmserve.service.status import InvalidArgumentError
from router.errors import echo
from router.http.errors import Names
from router.request_scope import REQUEST_ID_KEY

TIMEOUT_HEADER = "x-request-timeout-ms"
_MAX_TIMEOUT_S = 24 * 3600.0
# Of milliseconds: more than a day, and a number that may be made of digits.
_MAX_DIGITS = 12


class HttpCall:
    """To be ended exactly when the exchange ends. `names`: how the client calls the core's fields."""

    protocol: Final = "http"

    def __init__(self, caller: Identity, headers: Mapping[str, str]) -> None:
        """Raises InvalidArgumentError: the header with the deadline has none."""
        self.caller = caller
        self.headers = headers
        self.names = Names()
        self.response_headers: dict[str, str] = {}
        self._started = time.monotonic()
        self._timeout_s: float | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._ended = False
        given = headers.get(TIMEOUT_HEADER)
        if given is not None:
            if not given.isascii() or not given.isdigit() or len(given) > _MAX_DIGITS:
                raise InvalidArgumentError(
                    TIMEOUT_HEADER, f"{echo(given)!r} is not allowed; allowed: whole milliseconds, at most a day"
                )
            self.limit_time(TIMEOUT_HEADER, int(given) / 1000)

    @property
    def request_id(self) -> str | None:
        """As the client was told it."""
        return self.response_headers.get(REQUEST_ID_KEY)

    def limit_time(self, field: str, seconds: float | None) -> None:
        """The deadline is so long after receipt, if it is not earlier. Raises InvalidArgumentError."""
        if seconds is None:
            return
        if not 0 < seconds <= _MAX_TIMEOUT_S:
            raise InvalidArgumentError(field, f"{seconds:g} s is not allowed; allowed: above 0, at most a day")
        self._timeout_s = seconds if self._timeout_s is None else min(seconds, self._timeout_s)

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: there is none."""
        if self._timeout_s is None:
            return None
        return max(0.0, self._started + self._timeout_s - time.monotonic())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Run `callback` once when the exchange ends."""
        if self._ended:
            callback()
        else:
            self._callbacks.append(callback)

    async def accept(self, headers: Mapping[str, str]) -> None:
        """Headers for the response, which begins with the first message."""
        self.response_headers.update(headers)

    def end(self) -> None:
        """The exchange is over. Idempotent."""
        self._ended = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def part(self, number: int) -> HttpCall:
        """A call of its own for one of several prompts. It ends with this one, or before."""
        given = self.headers.get(REQUEST_ID_KEY)
        headers = dict(self.headers) if given is None else {**self.headers, REQUEST_ID_KEY: f"{given}-{number}"}
        headers.pop(TIMEOUT_HEADER, None)
        part = HttpCall(self.caller, headers)
        part._started, part._timeout_s = self._started, self._timeout_s
        self.add_done_callback(part.end)
        return part
