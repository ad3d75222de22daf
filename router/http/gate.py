"""The way into the front: who calls, how much they send, how long they take; and the end of a request in any case."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from glmserve.service.identity import ANONYMOUS, Identity
from glmserve.service.reload import Reloaded
from glmserve.service.status import ServiceError, UnauthenticatedError
from router.access.keys import Keys
from router.http.call import HttpCall
from router.http.errors import BodyTimeoutError, BodyTooLargeError
from router.http.exchange import Exchange
from router.http.web import PATHS
from router.stall import StallWatch

# For probes, and for the page that asks its reader for the key.
OPEN_PATHS = frozenset({"/healthz", "/readyz"}) | PATHS
_SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class GateLimits:
    """`body_s`: for the whole body to come. `stall_s`: for the client to take a piece of the response."""

    max_body_bytes: int
    body_s: float
    stall_s: float


class Gate:
    """The ASGI application that the server runs; the routes are behind it.

    Every exchange ends here exactly once: when its client leaves or stalls, what it runs is cancelled.
    """

    def __init__(self, app: ASGIApp, keys: Reloaded[Keys] | None, limits: GateLimits) -> None:
        """`keys` None: everybody may call."""
        self._app = app
        self._keys = keys
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        watch = StallWatch(self._limits.stall_s)
        exchange = Exchange(scope, receive, send, watch)
        try:
            await self._serve(exchange)
        except asyncio.CancelledError:
            exchange.abandon()
        finally:
            watch.close()
            exchange.end()

    async def _serve(self, exchange: Exchange) -> None:
        headers = exchange.headers
        try:
            caller = ANONYMOUS if exchange.path in OPEN_PATHS else self._identify(headers)
            exchange.call = HttpCall(caller, headers)
            body = await self._body(exchange)
        except ServiceError as error:
            await exchange.refuse(error)
            return
        await exchange.run(self._app, body)

    def _identify(self, headers: dict[str, str]) -> Identity:
        if self._keys is None:
            return ANONYMOUS
        key = headers.get("x-api-key")
        if key is None:
            given = headers.get("authorization")
            if given is None:
                raise UnauthenticatedError("no API key; send it as Authorization: Bearer KEY, or as x-api-key: KEY")
            scheme, _, key = given.partition(" ")
            if scheme.lower() != _SCHEME or not key:
                raise UnauthenticatedError("authorization: not of the form Bearer KEY")
        identity = self._keys.current().identify(key)
        if identity is None:
            raise UnauthenticatedError("the API key is not known here; ask the operator for one (`glm key create`)")
        return identity

    async def _body(self, exchange: Exchange) -> bytes:
        """What is over the limit is read to its end, but not kept: a client that still writes hears no refusal."""
        limit, body, size = self._limits.max_body_bytes, bytearray(), 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for piece in exchange.pieces():
                    size += len(piece)
                    if size <= limit:
                        body += piece
                    else:
                        body.clear()
        except TimeoutError:
            if size <= limit:
                raise BodyTimeoutError(f"the body was not complete within {self._limits.body_s:g} s") from None
        if size > limit:
            raise BodyTooLargeError(f"the body is over {limit} bytes, the most that is taken here")
        return bytes(body)
