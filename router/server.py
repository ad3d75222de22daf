"""The router process: settings, model files, server, workers, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

import structlog
import uvloop

from glmserve.service import logs
from glmserve.service.grpc_server import (
    GrpcServer,
    ServerSecurity,
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
from router.access.keys import read_keys
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
    with running_telemetry("router", config) as telemetry:
        router = await Router.start(config, model, telemetry)
        log.info("listening", address=router.address, workers=config.worker, metrics=telemetry.metrics_address)
        try:
            if config.ready_file is not None:
                write_ready_file(config.ready_file, router.address, tls=config.tls)
            await wait_for_stop(asyncio.shield(router.background))
            log.info("draining", limit_s=config.drain_s)
            await router.drain(config.drain_s)
        finally:
            await router.stop()
    log.info("stopped")


class Router:
    """A running router. `background` ends only by cancellation or by a failure."""

    def __init__(self, started: GrpcServer, pool: WorkerPool, admission: Admission) -> None:
        self._started = started
        self._pool = pool
        self._admission = admission
        self.background = asyncio.create_task(self._run())

    @classmethod
    async def start(cls, config: RouterConfig, model: TextModel, telemetry: Telemetry) -> Router:
        """Listen, and begin to connect to the workers.

        Raises OSError: the address cannot be bound. Raises SettingsError: a file of certificates or keys is wrong.
        """
        security = _security(config)
        settings = PoolSettings(config.worker, model.vocab_size, config.heartbeat_s, config.resolve_s)
        pool = WorkerPool(settings, config.worker_channels())
        limits = AdmissionLimits(
            config.max_requests, config.max_prompt_tokens, config.max_queue_s, config.retry_after_ms
        )
        admission = Admission(limits, Tenants(), pool.outlook)
        router_telemetry = RouterTelemetry(telemetry)
        router_telemetry.observe(lambda: pool.num_serving)
        failover = FailoverLimits(config.failover_moves, config.failover_wait_s)
        service = InferenceService(InferenceCore(model, pool, failover, admission, router_telemetry))
        pace = wire.StreamPace(config.stall_s, config.stream_interval_ms / 1000)
        started = await start_server(
            lambda server: wire.register(SERVICE, service, server, pace),
            (SERVICE.full_name,),
            config.listen,
            config.max_message_bytes,
            security,
        )
        return cls(started, pool, admission)

    @property
    def address(self) -> str:
        """Where it listens, HOST:PORT."""
        return self._started.address

    async def drain(self, limit_s: float) -> None:
        """Turn NOT_SERVING, refuse new requests, and wait for the running ones, at most `limit_s`."""
        self._admission.close()
        self._pool.changed.fire()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._admission.wait_idle(), limit_s)

    async def stop(self) -> None:
        """End what still runs, and close."""
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


def _security(config: RouterConfig) -> ServerSecurity:
    interceptors = []
    if config.keys_file is not None:
        path = config.keys_file
        interceptors.append(ApiKeyInterceptor(Reloaded((path,), lambda: read_keys(path))))
    return ServerSecurity(config.credentials(), interceptors, config.reflects)
