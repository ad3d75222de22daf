"""One way to bring up a grpc.aio server: options, health, reflection, the bound address, shutdown on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from glmserve.service.status import ErrorInterceptor

# A client may ping every 10 s, with or without calls: less would answer the keepalive of well-behaved clients
# (30 s here) with GOAWAY too_many_pings.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


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


async def start_server(
    register: Callable[[grpc.aio.Server], None], services: Sequence[str], listen: str, max_message_bytes: int
) -> GrpcServer:
    """Bind `listen` ("host:port", port 0: any free one) and start, with every service NOT_SERVING.

    `services`: full names of what `register` adds. Raises OSError: the address cannot be bound.
    """
    options = [
        *_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
    server = grpc.aio.server(options=options, interceptors=[ErrorInterceptor()])
    register(server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    host = listen.rpartition(":")[0]
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from None
    started = GrpcServer(server, servicer, tuple(services), f"{host}:{port}")
    await started.set_serving(False)
    await server.start()
    return started


def write_ready_file(path: Path, address: str) -> None:
    """Tell a launcher where we listen: {"address": ..., "pid": ...}, appearing whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"address": address, "pid": os.getpid()}), encoding="utf-8")
    partial.replace(path)


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
