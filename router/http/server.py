"""The HTTP server beside the gRPC server, on the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from router.http.protocol import bounded_protocol

# Longer than a load balancer's, so that it is not us who close a connection that it is about to use.
_KEEP_ALIVE_S = 75
_MAX_HEAD_BYTES = 16 << 10
_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class HttpBinding:
    """Where and how to listen: HOST:PORT; None: plain text; how many connections are held."""

    listen: str
    tls: ssl.SSLContext | None
    max_connections: int


class _Server(uvicorn.Server):
    """Signals are the process's own affair."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Running. `address`: HOST:PORT that was really bound."""

    def __init__(self, server: _Server, bound: socket.socket, address: str) -> None:
        self.address = address
        self._server = server
        self._task = asyncio.create_task(server.serve([bound]))

    @classmethod
    async def start(cls, app: ASGIApp, binding: HttpBinding) -> HttpServer:
        """Raises OSError: the address cannot be bound."""
        bound, address = _bind(binding.listen)
        context = binding.tls
        config = uvicorn.Config(
            app,
            http=bounded_protocol(binding.max_connections),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            ssl_context_factory=None if context is None else lambda _config, _default: context,
        )
        # What strangers send is no news; what goes wrong here is logged where it is caught.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server = _Server(config)
        started = cls(server, bound, address)
        while not server.started:
            await asyncio.wait((started._task,), timeout=0.001)
            if started._task.done():
                started._task.result()
        return started

    async def stop(self) -> None:
        """Accept nothing new, give responses a moment to leave, and close."""
        self._server.should_exit = True
        await self._task


def _bind(listen: str) -> tuple[socket.socket, str]:
    host, _, port = listen.rpartition(":")
    try:
        [family, *_, address] = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        bound = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        raise OSError(f"cannot listen for HTTP on {listen}: {error}") from None
    bound.setblocking(False)
    return bound, f"{host}:{bound.getsockname()[1]}"
