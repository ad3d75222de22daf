"""The router process: settings, model files, server, workers, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
import uvloop

from glmserve.service import logs
from glmserve.service.grpc_server import (
    GrpcServer,
    ServerSecurity,
    connection_budget,
    start_server,
    stop_with_stdin,
    wait_for_stop,
    write_ready_file,
)
from glmserve.service.reload import Reloaded
from glmserve.service.settings import SettingsError
from glmserve.service.telemetry import Telemetry, running_telemetry
from router import wire
from router.access.interceptor import ApiKeyInterceptor
from router.access.keys import Keys, read_keys
from router.config import RouterConfig
from router.dispatch.admission import Admission, AdmissionLimits
from router.dispatch.request_run import FailoverLimits
from router.dispatch.tenants import Tenants
from router.dispatch.worker_pool import PoolSettings, WorkerPool
from router.errors import CheckpointError
from router.inference import InferenceCore
from router.model import TextModel
from router.service import SERVICE, InferenceService
from router.telemetry import RouterTelemetry

if TYPE_CHECKING:
    from router.http.server import HttpServer

log = structlog.get_logger()

# For the statuses of the last requests to leave, once all requests are done or the drain limit is over.
_CLOSE_GRACE_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code: 0, or 2 with one line on stderr if it cannot start."""
    try:
        config = RouterConfig.load(argv, prog="glm router")
        logs.configure("router", config.log_level)
        if config.stop_with_stdin:
            stop_with_stdin()
        model = TextModel.load(config.model)
        uvloop.run(serve(config, model))
    except (SettingsError, CheckpointError, OSError) as error:
        print(f"glm router: {error}", file=sys.stderr)
        return 2
    return 0


async def serve(config: RouterConfig, model: TextModel) -> None:
    """Serve until a signal, then drain. Raises OSError: the address cannot be bound or the ready file not written."""
    with running_telemetry("router", config, shows_metrics=config.http_listen is not None) as telemetry:
        router = await Router.start(config, model, telemetry)
        log.info(
            "listening",
            address=router.address,
            http=router.http_address,
            workers=config.worker,
            metrics=telemetry.metrics_address,
        )
        try:
            if config.ready_file is not None:
                write_ready_file(config.ready_file, router.address, tls=config.tls, http=router.http_address)
            await wait_for_stop(asyncio.shield(router.background))
            log.info("draining", limit_s=config.drain_s)
            await router.drain(config.drain_s)
        finally:
            await router.stop()
    log.info("stopped")


class Router:
    """A running router. `background` ends only by cancellation or by a failure."""

    def __init__(self, started: GrpcServer, http: HttpServer | None, pool: WorkerPool, admission: Admission) -> None:
        self._started = started
        self._http = http
        self._pool = pool
        self._admission = admission
        self.background = asyncio.create_task(self._run())

    @classmethod
    async def start(cls, config: RouterConfig, model: TextModel, telemetry: Telemetry) -> Router:
        """Listen, and begin to connect to the workers.

        Raises OSError: the address cannot be bound. Raises SettingsError: a file of certificates or keys is wrong.
        """
        keys = _keys(config)
        security = _security(config, keys)
        settings = PoolSettings(config.worker, model.vocab_size, config.heartbeat_s, config.resolve_s)
        pool = WorkerPool(settings, config.worker_channels())
        limits = AdmissionLimits(
            config.max_requests, config.max_prompt_tokens, config.max_queue_s, config.retry_after_ms
        )
        admission = Admission(limits, Tenants(), pool.outlook)
        router_telemetry = RouterTelemetry(telemetry)
        router_telemetry.observe(lambda: pool.num_serving)
        failover = FailoverLimits(config.failover_moves, config.failover_wait_s)
        core = InferenceCore(model, pool, failover, admission, router_telemetry)
        service = InferenceService(core)
        pace = wire.StreamPace(config.stall_s, config.stream_interval_ms / 1000)
        connections = connection_budget() // (1 if config.http_listen is None else 2)
        started = await start_server(
            lambda server: wire.register(SERVICE, service, server, pace),
            (SERVICE.full_name,),
            config.listen,
            config.max_message_bytes,
            security,
            max_connections=connections,
        )
        http = None
        if config.http_listen is not None:
            from router.http.front import FrontSettings, start_front  # noqa: PLC0415 - FastAPI is slow to import

            front = FrontSettings(
                config.http_listen, config.tls_files, connections, config.max_message_bytes, pace, telemetry.registry
            )
            try:
                http = await start_front(core, keys, front, lambda: pool.num_serving > 0 and not admission.closed)
            except BaseException:
                await started.server.stop(None)
                raise
        return cls(started, http, pool, admission)

    @property
    def address(self) -> str:
        """Where it listens, HOST:PORT."""
        return self._started.address

    @property
    def http_address(self) -> str | None:
        """The same of the HTTP front; None: there is none."""
        return None if self._http is None else self._http.address

    async def drain(self, limit_s: float) -> None:
        """Turn NOT_SERVING, refuse new requests, and wait for the running ones, at most `limit_s`."""
        self._admission.close()
        self._pool.changed.fire()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._admission.wait_idle(), limit_s)

    async def stop(self) -> None:
        """End what still runs, and close."""
        if self._http is not None:
            await self._http.stop()
        await self._started.server.stop(_CLOSE_GRACE_S)
        self.background.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.background

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pool.run())
            tasks.create_task(self._follow_workers())

    async def _follow_workers(self) -> None:
        """We are ready while any worker is, until we drain."""
        while True:
            seen = self._pool.changed.count
            await self._started.set_serving(self._pool.num_serving > 0 and not self._admission.closed)
            await self._pool.changed.wait_beyond(seen)


def _keys(config: RouterConfig) -> Reloaded[Keys] | None:
    path = config.keys_file
    return None if path is None else Reloaded((path,), lambda: read_keys(path))


def _security(config: RouterConfig, keys: Reloaded[Keys] | None) -> ServerSecurity:
    interceptors = [] if keys is None else [ApiKeyInterceptor(keys)]
    return ServerSecurity(config.credentials(), interceptors, config.reflects)
