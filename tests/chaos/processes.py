"""Services as processes that a test kills, stops and starts again; what they log is kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc

ANY_PORT = "127.0.0.1:0"
SERVING = health_pb2.HealthCheckResponse.SERVING


class Service:
    """`python -m MODULE ARGS`. Started again it takes the address that it had."""

    def __init__(self, module: str, directory: Path, *args: str, environment: Mapping[str, str] | None = None) -> None:
        self.module = module
        self._environment = {**os.environ, **(environment or {})}
        self.address = ANY_PORT
        self._args = args
        self._ready = directory / "ready.json"
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    def start(self) -> None:
        """Return once it listens, which is when it writes its ready file."""
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", self.module, "--listen", self.address, "--ready-file", str(self._ready)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._args], stdin=subprocess.DEVNULL, stderr=log, env=self._environment
            )
        while not self._ready.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"{self.module} ended with {self.process.wait(0.02)}: {self._log.read_text()}")
        self.address = json.loads(self._ready.read_text())["address"]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """As `kill -9`; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.terminate()
        return self.process.wait()

    @property
    def last_words(self) -> str:
        """The last line on stderr."""
        return self._log.read_text().splitlines()[-1]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its log lines of this event, oldest first."""
        lines = (json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == name]


@contextlib.contextmanager
def services(*made: Service) -> Iterator[None]:
    """Kill at the end what still runs, stopped processes included."""
    try:
        yield
    finally:
        for service in made:
            if service._process is not None and service._process.poll() is None:
                service.kill()


async def wait_health(address: str, serving: bool, service: str = "") -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        client: Any = health_pb2_grpc.HealthStub(channel)
        watch = client.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)
        async for response in watch:
            if (response.status == SERVING) == serving:
                return


@contextlib.asynccontextmanager
async def engine(address: str) -> AsyncIterator[engine_pb2_grpc.EngineServiceAsyncStub]:
    """A worker's own port."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield engine_pb2_grpc.EngineServiceStub(channel)


async def running_requests(address: str) -> int:
    """How many requests run on a worker now."""
    async with engine(address) as client:
        return int((await client.GetLoad(engine_pb2.GetLoadRequest())).load.running_requests)


async def wait_idle(address: str) -> None:
    """Return once nothing runs or waits on a worker and all pages are given back: asked, because nothing tells it."""
    async with engine(address) as client:
        while True:
            load = (await client.GetLoad(engine_pb2.GetLoadRequest())).load
            pages = load.free_pages + load.cached_pages
            if load.running_requests == load.waiting_requests == 0 and pages == load.total_pages:
                return
