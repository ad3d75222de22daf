"""deploy/grpc/service_config.json in a gRPC client: against servers that are flaky, full, late or draining."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from glmserve.inference.v1 import inference_pb2, inference_pb2_grpc
from glmserve.service.grpc_server import GrpcServer, start_server
from glmserve.service.status import InvalidArgumentError, OverloadedError, ServiceError, UnavailableError

SERVICE = "glmserve.inference.v1.InferenceService"
CONFIG = (Path(__file__).parents[2] / "deploy/grpc/service_config.json").read_text()


class Flaky(inference_pb2_grpc.InferenceServiceServicer):
    """Ends the first calls with `errors`, one each; with `late` they come after the first message."""

    def __init__(self, errors: Sequence[ServiceError] = (), *, late: bool = False) -> None:
        self.errors = list(errors)
        self.late = late
        self.calls: list[float] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.calls.append(time.monotonic())
        if self.late:
            yield inference_pb2.GenerateResponse(text="one")
        if self.errors:
            raise self.errors.pop(0)
        yield inference_pb2.GenerateResponse(text="two")


@contextlib.asynccontextmanager
async def serving(service: Flaky, listen: str = "127.0.0.1:0", *, healthy: bool = True) -> AsyncIterator[GrpcServer]:
    def register(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)

    started = await start_server(register, (SERVICE,), listen, 1 << 22)
    await started.set_serving(healthy)
    try:
        yield started
    finally:
        await started.server.stop(None)


@contextlib.asynccontextmanager
async def connected(*addresses: str) -> AsyncIterator[Any]:
    """A client whose channel has the service config and nothing else of note."""
    options = [("grpc.service_config", CONFIG), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel("ipv4:" + ",".join(addresses), options=options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def text(client: Any) -> str:
    return "".join([message.text async for message in client.Generate(inference_pb2.GenerateRequest(), timeout=30)])


def flaky(*errors: ServiceError, late: bool = False) -> Flaky:
    return Flaky(errors, late=late)  # type: ignore[abstract]  # no other method is called


async def test_a_call_that_is_refused_is_made_again() -> None:
    service = flaky(UnavailableError("draining"), UnavailableError("draining"))
    async with serving(service) as server, connected(server.address) as client:
        assert await text(client) == "two"
    assert len(service.calls) == 3


async def test_a_full_router_is_asked_again_when_it_said() -> None:
    service = flaky(OverloadedError("full", 700, "requests"))
    async with serving(service) as server, connected(server.address) as client:
        assert await text(client) == "two"
    first, second = service.calls
    assert second - first > 0.6, "the policy's own first backoff is 0.1 s at most"


async def test_the_number_of_attempts_is_bounded() -> None:
    service = flaky(*[UnavailableError("down")] * 9)
    async with serving(service) as server, connected(server.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await text(client)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(service.calls) == 5


async def test_what_is_the_client_s_fault_is_not_repeated() -> None:
    service = flaky(InvalidArgumentError("prompt", "missing"))
    async with serving(service) as server, connected(server.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await text(client)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(service.calls) == 1


async def test_a_stream_that_has_begun_is_not_repeated() -> None:
    service = flaky(UnavailableError("lost"), late=True)
    async with serving(service) as server, connected(server.address) as client:
        with pytest.raises(grpc.aio.AioRpcError):
            await text(client)
    assert len(service.calls) == 1


async def test_a_call_waits_for_a_router_that_is_not_there_yet() -> None:
    async with serving(flaky()) as first:
        address = first.address
    async with connected(address) as client:
        waiting = asyncio.create_task(text(client))
        async with serving(flaky(), address):
            assert await waiting == "two"


async def test_a_draining_router_gets_no_new_calls() -> None:
    draining, healthy = flaky(), flaky()
    async with (
        serving(draining, healthy=False) as one,
        serving(healthy) as other,
        connected(one.address, other.address) as client,
    ):
        for _ in range(6):
            assert await text(client) == "two"
    assert (len(draining.calls), len(healthy.calls)) == (0, 6)
