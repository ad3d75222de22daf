"""What a server keeps to itself, and where it stops taking on more."""

from __future__ import annotations

import resource
import struct
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from glmserve.service.grpc_server import raise_file_limit
from tests.chaos.http2 import SETTINGS, raw
from tests.unit.router_harness import bench

# HTTP/2 settings by number.
_MAX_CONCURRENT_STREAMS = 3
_MAX_HEADER_LIST_SIZE = 6


async def assert_reflects(channel: grpc.aio.Channel) -> None:
    """The server tells what services it has."""
    call = reflection_call(channel)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await call.done_writing()
    assert len([reply async for reply in call]) == 1


def reflection_call(channel: grpc.aio.Channel) -> Any:
    service: Any = reflection_pb2_grpc
    return service.ServerReflectionStub(channel).ServerReflectionInfo()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"reflection": False}, False),
        ({"listen": "0.0.0.0:0", "insecure": True}, False),
        ({"listen": "0.0.0.0:0", "insecure": True, "reflection": True}, True),
    ],
)
async def test_reflection_is_for_loopback_unless_asked_for(settings: dict[str, Any], expected: bool) -> None:
    async with bench(**settings) as b:
        port = b.router.address.rpartition(":")[2]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            if expected:
                await assert_reflects(channel)
            else:
                assert await reflection_call(channel).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_connections_beyond_the_files_of_the_process_are_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glmserve.service.grpc_server.raise_file_limit", lambda: 600)
    async with bench() as b, AsyncExitStack() as stack:
        taken = 1  # the test's own channel
        while True:
            connection = await stack.enter_async_context(raw(b.router.address))
            if await connection.read_until(SETTINGS) is None:
                break
            taken += 1
        assert taken == 600 - 512
        await b.wait_health(True)


def test_the_file_limit_is_raised_to_what_is_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_the_bounds_of_a_connection_are_announced() -> None:
    async with bench() as b, raw(b.router.address) as connection:
        announced = await connection.read_until(SETTINGS)
        assert announced is not None
        values = dict(struct.iter_unpack(">HI", announced.payload))
    assert values[_MAX_CONCURRENT_STREAMS] == 4096
    assert values[_MAX_HEADER_LIST_SIZE] == 16384
