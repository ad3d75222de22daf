"""Bounds on what a client may do to the front, around an application of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.gate import Gate, GateLimits
from router.http.server import HttpBinding, HttpServer

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, limits: GateLimits) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server with `app` behind the gate."""
    server = await HttpServer.start(Gate(app, None, limits), HttpBinding("127.0.0.1:0", None, 10))
    host, _, port = server.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.stop()


async def test_a_client_that_never_reads_is_cut_off() -> None:
    ended = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
        finally:
            ended.set()

    async with serving(endless, GateLimits(1 << 20, 5, 0.2)) as (_, writer):
        writer.write(HEAD + b"body")
        await ended.wait()


async def test_a_body_that_does_not_come_is_a_timeout() -> None:
    async def unreached(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("served")

    async with serving(unreached, GateLimits(1 << 20, 0.1, 5)) as (reader, writer):
        writer.write(HEAD)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")


async def test_what_fails_in_mid_response_is_cut_off_and_not_taken_for_whole() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        raise ValueError("in mid-response")

    async with serving(failing, GateLimits(1 << 20, 5, 5)) as (reader, writer):
        writer.write(HEAD + b"body")
        with contextlib.suppress(ConnectionError):
            whole = await reader.read()
            assert not whole.partition(b"\r\n\r\n")[2]
