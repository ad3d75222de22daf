"""TLS of the HTTP front, and certificates that change while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from glmserve.service.tls import TlsFiles
from router.http.server import HttpBinding, HttpServer
from router.http.tls import server_context
from tests.certificates import Authority


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def status(server: HttpServer, trusted: TlsFiles, own: TlsFiles | None) -> bytes:
    context = ssl.create_default_context(cafile=str(trusted.ca))
    if own is not None:
        assert own.cert is not None
        context.load_cert_chain(own.cert, own.key)
    host, _, port = server.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return line


async def answered(server: HttpServer, trusted: TlsFiles, own: TlsFiles | None) -> bool:
    """With TLS 1.3 a client hears that its certificate is not taken when it reads."""
    try:
        return b"204" in await status(server, trusted, own)
    except (ssl.SSLError, ConnectionError):
        return False


async def test_new_connections_get_the_new_certificates(tmp_path: Path) -> None:
    old = Authority(tmp_path)
    files = old.issue("router")
    server = await HttpServer.start(answer, HttpBinding("127.0.0.1:0", server_context(files), 10))
    try:
        client = old.issue("client")
        assert b"204" in await status(server, client, client)
        other = tmp_path / "other"
        other.mkdir()
        stranger = Authority(other).issue("client")
        with pytest.raises(ssl.SSLError):
            await status(server, stranger, stranger)
        new = Authority(tmp_path)
        new.issue("router")
        fresh = new.issue("fresh")
        assert await answered(server, fresh, fresh)
        assert not await answered(server, fresh, client)
    finally:
        await server.stop()


async def test_a_client_without_a_certificate_is_turned_away(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("router")
    server = await HttpServer.start(answer, HttpBinding("127.0.0.1:0", server_context(files), 10))
    try:
        assert not await answered(server, files, None)
    finally:
        await server.stop()


async def test_connections_beyond_the_limit_are_closed() -> None:
    server = await HttpServer.start(answer, HttpBinding("127.0.0.1:0", None, 1))
    try:
        host, _, port = server.address.partition(":")
        reader, first = await asyncio.open_connection(host, int(port))
        first.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"204" in await reader.readline()
        other, second = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            assert await other.read() == b""
        first.close()
        second.close()
    finally:
        await server.stop()
