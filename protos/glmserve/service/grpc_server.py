"""One way to bring up a grpc.aio server: options, health, reflection, the bound address, shutdown on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from glmserve.service.status import ErrorInterceptor

# Beyond these a connection, a stream or a ping is refused, so that no peer can make the process grow without bound.
_MAX_RPCS = 16_384
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients may ping twice a second, with or without calls; who does so more often gets GOAWAY too_many_pings.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_concurrent_streams", 4096),
    # A client that says nothing loses its connection: before the handshake is done, or when it has had no call.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.so_reuseport", 0),
)
# Files and sockets of our own: the checkpoint's shards, worker links, logs.
_RESERVED_FILES = 512
_MANY_FILES = 1 << 20


@dataclass(frozen=True)
class ServerSecurity:
    """How a server meets strangers. `credentials` None: plain text. `interceptors` run before any handler."""

    credentials: grpc.ServerCredentials | None = None
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    reflection: bool = False


# The health service's name for "alive", beside the names of services, which stand for "ready".
LIVENESS = "liveness"


@dataclass(frozen=True)
class GrpcServer:
    """A server that accepts connections. `address` has the port that was really bound."""

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    services: tuple[str, ...]
    address: str

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service and of the server as a whole ("")."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.services):
            await self.health.set(name, status)

    async def set_alive(self, alive: bool) -> None:
        """Set the health of LIVENESS: whether the process is worth keeping, be it ready or not."""
        status = health_pb2.HealthCheckResponse.SERVING if alive else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set(LIVENESS, status)


async def start_server(
    register: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    listen: str,
    max_message_bytes: int,
    security: ServerSecurity = ServerSecurity(),
    *,
    max_connections: int | None = None,
) -> GrpcServer:
    """Bind `listen` ("host:port", port 0: any free one) and start, with every service NOT_SERVING and LIVENESS SERVING.

    `services`: full names of what `register` adds. `max_connections`: all that the process may have, if not given.
    Raises OSError: the address cannot be bound.
    """
    options = [
        *_OPTIONS,
        ("grpc.max_allowed_incoming_connections", max_connections or connection_budget()),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
    server = grpc.aio.server(
        options=options,
        interceptors=[ErrorInterceptor(), *security.interceptors],
        maximum_concurrent_rpcs=_MAX_RPCS,
    )
    register(server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if security.reflection:
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    started = GrpcServer(server, servicer, tuple(services), _bind(server, listen, security.credentials))
    await started.set_serving(False)
    await started.set_alive(True)
    await server.start()
    return started


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    """The address with the port that was really bound."""
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from None
    return f"{listen.rpartition(':')[0]}:{port}"


def connection_budget() -> int:
    """Connections that the process may hold beside its own files: 2 or more. Raises its limit of open files."""
    return max(raise_file_limit() - _RESERVED_FILES, 2)


def raise_file_limit() -> int:
    """Let this process open as many files, and so connections, as it may without privilege. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return _MANY_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def write_ready_file(path: Path, address: str, *, tls: bool = False, http: str | None = None) -> None:
    """Tell a launcher where we listen, as a JSON object that appears whole or not at all.

    Its keys: address, pid, tls, and http, the address of an HTTP front, which is null if there is none.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    found = {"address": address, "pid": os.getpid(), "tls": tls, "http": http}
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(path)


def stop_with_stdin() -> None:
    """Send this process SIGTERM when its standard input ends. Reads it on a thread of its own, from now on."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()


async def wait_for_stop(failure: Awaitable[None] | None = None) -> None:
    """Return on SIGTERM or SIGINT, or when `failure` finishes (raising what it raises)."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waits: list[asyncio.Future[object]] = [asyncio.ensure_future(stop.wait())]
    if failure is not None:
        waits.append(asyncio.ensure_future(failure))
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()
