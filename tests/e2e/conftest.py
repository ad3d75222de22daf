"""Worker and router as processes, on the embedded model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from deploy.local import ANY_PORT, LocalCluster, LocalOptions, local_cluster
from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.e2e.client import connect

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def cluster(model_dir: Path) -> Iterator[LocalCluster]:
    """One pair for all tests that leave it as they found it. A machine that is slow for a moment refuses nobody."""
    options = LocalOptions(model_dir, router_args=["--max-queue-s", "600", "--http-listen", ANY_PORT])
    with local_cluster(options, report=lambda _: None) as running:
        yield running


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    async with connect(cluster.router) as client:
        yield client


class Worker:
    """The worker's own view, asked over its own port."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._client = engine_pb2_grpc.EngineServiceStub(channel)

    async def load(self) -> engine_pb2.Load:
        response: engine_pb2.GetLoadResponse = await self._client.GetLoad(engine_pb2.GetLoadRequest())
        return response.load

    async def idle(self) -> engine_pb2.Load:
        """The load once nothing runs or waits: polled, because nothing announces it."""
        while True:
            load = await self.load()
            if load.running_requests == load.waiting_requests == 0:
                return load


@pytest.fixture
async def worker(cluster: LocalCluster) -> AsyncIterator[Worker]:
    async with grpc.aio.insecure_channel(cluster.workers[0]) as channel:
        yield Worker(channel)
