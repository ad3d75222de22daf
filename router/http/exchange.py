"""One HTTP request and its response, from the server's events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glmserve.service.status import ServiceError
from router.http.call import HttpCall
from router.http.errors import Failure, Names
from router.stall import StallWatch

# Key of the connection's transport in an exchange's state (`router.http.protocol`).
TRANSPORT = "transport"
CALL = "call"


class Exchange:
    """`headers`: names in lower case; of one that is repeated, the last. `call`: set once it is known who calls."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, watch: StallWatch) -> None:
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.call: HttpCall | None = None
        self._scope = scope
        self._receive = receive
        self._raw_send = send
        self._watch = watch
        self._complete = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """The request's body. Raises CancelledError: the client has left."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            more = message.get("more_body", False)
            yield message.get("body", b"")

    async def run(self, app: ASGIApp, body: bytes) -> None:
        """Let `app` answer. Raises CancelledError: the client has left, and so has `app`."""
        assert self.call is not None
        self._scope["state"][CALL] = self.call
        task = asyncio.current_task()
        assert task is not None
        leaving = asyncio.create_task(self._cancel_when_left(task))
        try:
            await app(self._scope, _replay(body), self._send)
        except Exception:
            # It is logged. A response that is not complete is cut off, so that it cannot be taken for whole.
            if not self._complete:
                self.abandon()
        finally:
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving

    async def refuse(self, error: ServiceError) -> None:
        """Answer with an error and close the connection: what else it brings was not asked for."""
        failure = Failure.of(error, Names())
        await failure.response(self.path, {"connection": "close"}, None)(self._scope, self._receive, self._send)

    def abandon(self) -> None:
        """Nothing more is sent, also not what waits to be."""
        transport: asyncio.Transport = self._scope["state"][TRANSPORT]
        transport.abort()

    def end(self) -> None:
        """Give back what the call holds."""
        if self.call is not None:
            self.call.end()

    async def _cancel_when_left(self, task: asyncio.Task[None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    async def _send(self, message: Message) -> None:
        self._watch.sending()
        await self._raw_send(message)
        self._watch.sent()
        self._complete = message["type"] == "http.response.body" and not message.get("more_body", False)


def _replay(body: bytes) -> Receive:
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
