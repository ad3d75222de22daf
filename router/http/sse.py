"""Server-sent events: messages of a stream as they come, at the pace of its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.errors import Failure, Names

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def data_event(data: Mapping[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: %b\n\n" % json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """An event with a name."""
    return b"event: %b\n%b" % (name.encode(), data_event(data))


async def begun(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """`items`, of which the first is there: what fails before it is raised here, while a status can still be sent."""
    first = await anext(items)

    async def all_items() -> AsyncIterator[T]:
        yield first
        async for item in items:
            yield item

    return all_items()


class EventStream(Response):
    """The response. Between two events pass at least `interval_s`: what comes meanwhile merges at its source."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_error: Callable[[Failure], bytes],
        names: Names,
        interval_s: float,
        headers: Mapping[str, str],
    ) -> None:
        """`on_error`: the event for a failure, which then is the last one."""
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_error = on_error
        self._names = names
        self._interval_s = interval_s
        self.init_headers({**headers, "cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        now = asyncio.get_running_loop().time
        async for event in self._guarded():
            sent = now()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if self._interval_s:
                await asyncio.sleep(sent + self._interval_s - now())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _guarded(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events:
                yield event
        except Exception as error:
            yield self._on_error(Failure.of(error, self._names))
