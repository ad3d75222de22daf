"""Clients that leave, hurry or dawdle, and a worker that dies. Others must not notice, and nothing may leak."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.child import Child
from deploy.local import ANY_PORT, LocalCluster
from glmserve.inference.v1 import inference_pb2 as pb
from tests.e2e.client import connect, generate, request
from tests.e2e.conftest import Worker

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client

LONG = {"max_tokens": 3000, "ignore_eos": True}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_cancel_frees_the_pages_and_disturbs_nobody(client: Client, worker: Worker) -> None:
    undisturbed = await generate(client, "Once upon a time", max_tokens=48)
    other = asyncio.create_task(generate(client, "Once upon a time", max_tokens=48))
    call = client.Generate(request("The story of the sea", **LONG))
    assert (await call.read()) is not grpc.aio.EOF
    call.cancel()
    assert (await other).token_ids == undisturbed.token_ids
    load = await worker.idle()
    assert load.free_pages + load.cached_pages == load.total_pages


async def test_a_deadline_ends_a_request_in_flight(client: Client, worker: Worker) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in client.Generate(request("The story of the sea", **LONG), timeout=1.0):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await worker.idle()


async def test_a_reader_that_stops_reading_holds_up_nobody(client: Client, worker: Worker) -> None:
    slow = aiter(client.Generate(request("Once upon a time", max_tokens=100, ignore_eos=True)))
    ids = list((await anext(slow)).token_ids)
    assert len((await generate(client, "Roses are red,", max_tokens=24, ignore_eos=True)).token_ids) == 24
    await worker.idle()
    async for response in slow:
        ids += response.token_ids
    assert len(ids) == 100


@pytest.mark.parametrize(
    ("sampling", "field", "allowed"),
    [
        ({"temperature": float("nan")}, "temperature", "0"),
        ({"temperature": 2.5}, "temperature", "2"),
        ({"top_p": 0.0}, "top_p", "1"),
        ({"min_p": 1.5}, "min_p", "1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "10"),
        ({"presence_penalty": -3.0}, "presence_penalty", "-2"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": 10**6}, "max_tokens", "4096"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop": [""]}, "stop[0]", "1 to 256"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", "49151"),
        ({"logit_bias": {5: 101.0}}, "logit_bias", "100"),
    ],
)
async def test_bad_sampling_values_are_named(
    client: Client, sampling: dict[str, float], field: str, allowed: str
) -> None:
    await assert_refused(client, request("Hello", **sampling), field, allowed)


@pytest.mark.parametrize(
    ("bad", "field", "allowed"),
    [
        (pb.GenerateRequest(), "prompt", ""),
        (request(""), "prompt", ""),
        (request([]), "prompt_ids", ""),
        (request([1, 49152]), "prompt_ids", "49151"),
        (request([1] * 4096), "prompt", "4096"),
    ],
)
async def test_bad_prompts_are_named(client: Client, bad: pb.GenerateRequest, field: str, allowed: str) -> None:
    await assert_refused(client, bad, field, allowed)


async def assert_refused(client: Client, bad: pb.GenerateRequest, field: str, allowed: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in client.Generate(bad):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")
    assert allowed in (caught.value.details() or "")


async def test_invalid_utf8_is_an_invalid_argument(cluster: LocalCluster) -> None:
    async with grpc.aio.insecure_channel(cluster.router) as channel:
        call: Any = channel.unary_stream("/glmserve.inference.v1.InferenceService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(b"\x12\x02\xc3\x28"):  # field 2, two bytes that are no UTF-8
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_model_is_not_found(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.GetModel(pb.GetModelRequest(model="gpt-5"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "gpt-5" in (caught.value.details() or "")


# ---- a pair of its own, because its worker gets killed ----


@contextmanager
def service(name: str, module: str, tmp_path: Path, *args: str, listen: str = ANY_PORT) -> Iterator[tuple[Child, str]]:
    """Start a service and give its process and address as soon as it accepts connections."""
    ready = tmp_path / f"{name}.json"
    ready.unlink(missing_ok=True)
    child = Child(name, module, ["--listen", listen, "--ready-file", str(ready), *args])
    try:
        while not ready.exists():
            child.check()
        yield child, json.loads(ready.read_text())["address"]
    finally:
        child.stop()


@asynccontextmanager
async def health(address: str) -> AsyncIterator[AsyncIterator[int]]:
    """The changes of a service's health, from now on."""
    async with grpc.aio.insecure_channel(address) as channel:
        client: Any = health_pb2_grpc.HealthStub(channel)
        watch = client.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        yield (response.status async for response in watch)


async def until(changes: AsyncIterator[int], wanted: int) -> None:
    async for status in changes:
        if status == wanted:
            return


async def test_without_failover_a_killed_worker_is_unavailable_until_its_successor_serves(
    model_dir: Path, tmp_path: Path
) -> None:
    model = ("--model", str(model_dir))
    with service("worker", "engine_worker", tmp_path, *model) as (first, address):
        router_args = (*model, "--worker", address, "--failover-moves", "0")
        with service("router", "router", tmp_path, *router_args) as (_, router):
            async with connect(router) as client, health(router) as changes:
                await until(changes, SERVING)
                before = await generate(client, "Once upon a time", max_tokens=8)
                call = aiter(client.Generate(request("Once upon a time", **LONG)))
                await anext(call)
                first.kill()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                await until(changes, NOT_SERVING)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await generate(client, "Once upon a time", max_tokens=8)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                with service("worker", "engine_worker", tmp_path, *model, listen=address):
                    await until(changes, SERVING)
                    assert (await generate(client, "Once upon a time", max_tokens=8)).token_ids == before.token_ids
