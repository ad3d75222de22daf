"""Hostile clients: others must not notice, and nothing may leak: neither pages, tasks, files nor places."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from deploy.child import Child
from deploy.local import ANY_PORT
from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.chaos.hostile import BEHAVIOURS, Behaviour, open_files
from tests.chaos.http2 import SETTINGS, raw
from tests.e2e.client import connect, generate
from tests.unit.router_harness import bench, encode, step, wait_health

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client

# 10,000 with `make hostile`.
IDLE_CONNECTIONS = int(os.environ.get("GLM_IDLE_CONNECTIONS", "2000"))
PROMPT = "Once upon a time"


@dataclass(frozen=True)
class Census:
    """What both processes hold when nobody asks for anything."""

    router_files: int
    worker_files: int
    requests: int
    pages: int


@dataclass(frozen=True)
class Pair:
    """A worker and a router as processes."""

    worker: Child
    worker_address: str
    router: Child
    router_address: str

    async def census(self, engine: engine_pb2_grpc.EngineServiceAsyncStub) -> Census:
        load = (await engine.GetLoad(engine_pb2.GetLoadRequest())).load
        return Census(
            open_files(self.router.pid),
            open_files(self.worker.pid),
            load.running_requests + load.waiting_requests,
            load.total_pages - load.free_pages - load.cached_pages,
        )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    model = str(resolve_model(DEFAULT_MODEL))
    worker, worker_address = start(directory, "worker", "engine_worker", "--model", model)
    try:
        router, address = start(directory, "router", "router", "--model", model, "--worker", worker_address)
        try:
            yield Pair(worker, worker_address, router, address)
        finally:
            router.stop()
    finally:
        worker.stop()


def start(directory: Path, name: str, module: str, *args: str) -> tuple[Child, str]:
    """A service, once it listens, and its address."""
    ready = directory / f"{name}.json"
    child = Child(name, module, [*args, "--listen", ANY_PORT, "--ready-file", str(ready)])
    while not ready.exists():
        child.check()
    address: str = json.loads(ready.read_text())["address"]
    return child, address


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(pair.router_address) as channel:
        await wait_health(channel, True)
    async with connect(pair.router_address) as client:
        yield client


@pytest.fixture
async def engine(pair: Pair) -> AsyncIterator[engine_pb2_grpc.EngineServiceAsyncStub]:
    async with grpc.aio.insecure_channel(pair.worker_address) as channel:
        yield engine_pb2_grpc.EngineServiceStub(channel)


async def back_to(before: Census, pair: Pair, engine: engine_pb2_grpc.EngineServiceAsyncStub) -> None:
    """Until nothing more is held than before: polled, because nothing announces it."""
    while await pair.census(engine) != before:
        pair.router.check()
        pair.worker.check()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("behave", BEHAVIOURS, ids=lambda behave: behave.__name__)
async def test_others_go_on_and_nothing_is_kept(
    pair: Pair, client: Client, engine: engine_pb2_grpc.EngineServiceAsyncStub, behave: Behaviour
) -> None:
    undisturbed = await generate(client, PROMPT, max_tokens=12)
    before = await pair.census(engine)
    assert (before.requests, before.pages) == (0, 0)
    other = asyncio.create_task(generate(client, PROMPT, max_tokens=12))
    await behave(pair.router_address)
    assert (await other).token_ids == undisturbed.token_ids
    await back_to(before, pair, engine)


async def test_idle_connections_cost_a_file_each_and_keep_nobody_out(
    pair: Pair, client: Client, engine: engine_pb2_grpc.EngineServiceAsyncStub
) -> None:
    undisturbed = await generate(client, PROMPT, max_tokens=12)
    before = await pair.census(engine)
    async with AsyncExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            connection = await stack.enter_async_context(raw(pair.router_address))
            assert await connection.read_until(SETTINGS) is not None
        assert open_files(pair.router.pid) == before.router_files + IDLE_CONNECTIONS
        async with connect(pair.router_address) as newcomer:
            assert (await generate(newcomer, PROMPT, max_tokens=12)).token_ids == undisturbed.token_ids
    await back_to(before, pair, engine)


@pytest.mark.parametrize("behave", BEHAVIOURS, ids=lambda behave: behave.__name__)
async def test_no_task_and_no_file_of_the_router_outlives_its_client(behave: Behaviour) -> None:
    async with bench() as b:
        b.worker.answer = lambda submit: [step(submit.request_id, encode("Paris"))]
        for _ in range(3):
            if await leaves_nothing(behave, b.router.address):
                break
        else:
            raise AssertionError("each client leaves something")
        await b.router.drain(60)


async def leaves_nothing(behave: Behaviour, address: str) -> bool:
    """False too if something came up that stays, as a poller of gRPC's does. A leak leaves something each time."""
    tasks, files = len(asyncio.all_tasks()), open_files()
    await behave(address)
    try:
        async with asyncio.timeout(10):
            await until(lambda: len(asyncio.all_tasks()) <= tasks and open_files() <= files)
    except TimeoutError:
        return False
    return True


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.01)


async def test_a_prompt_larger_than_a_message_may_be_is_refused(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(client, "x" * (5 << 20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4194304" in (caught.value.details() or "")
