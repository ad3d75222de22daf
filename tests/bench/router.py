"""What a streamed token costs the router: its CPU time over many streams of a real pair."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from deploy.local import LocalOptions, local_cluster
from glmserve.inference.v1 import inference_pb2 as pb
from glmserve.inference.v1 import inference_pb2_grpc as rpc
from tests.bench.machine import cpu_seconds

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client

STREAMS = 64
TOKENS = 64


def router_cpu_us_per_token(model_dir: Path) -> float:
    """Microseconds of router CPU a token, over STREAMS concurrent streams of TOKENS tokens, tokenising included."""
    with local_cluster(LocalOptions(model_dir), report=lambda _: None) as cluster:
        asyncio.run(_load(cluster.router))
        before = cpu_seconds(cluster.router_pid)
        asyncio.run(_load(cluster.router))
        return (cpu_seconds(cluster.router_pid) - before) / (STREAMS * TOKENS) * 1e6


async def _load(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        client: Client = rpc.InferenceServiceStub(channel)
        await asyncio.gather(*(_stream(client, i) for i in range(STREAMS)))


async def _stream(client: Client, number: int) -> None:
    sampling = pb.SamplingOptions(temperature=1.0, seed=number, max_tokens=TOKENS, ignore_eos=True)
    async for _ in client.Generate(pb.GenerateRequest(prompt="Once upon a time", sampling=sampling)):
        pass
