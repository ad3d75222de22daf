"""Sends requests as planned and notes when what came back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from deploy.errors import DeployError
from deploy.load.arrivals import Arrival
from glmserve.inference.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Inference

Metadata: TypeAlias = tuple[tuple[str, str], ...]

# Ids of byte-level tokenisers below this are bytes and common pieces in every vocabulary we serve; ids at the very end
# are control tokens.
_MAX_ID = 10_000


@dataclass(slots=True)
class Sample:
    """How one request fared. Seconds from the start of the load; `due_s` is when it had to be sent.

    Latencies count from `due_s`: a client that falls behind must not flatter the server.
    """

    due_s: float
    sent_s: float
    status: str = "OK"
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_s: float | None = None
    end_s: float = 0.0
    retry_after_ms: int | None = None
    gaps_s: list[float] = field(default_factory=list)  # between messages that brought tokens

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def total_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def seconds_per_token(self) -> float | None:
        """Mean of decoding, the first token apart. None with fewer than two tokens."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)


class LoadClient:
    """Prompts are random ids, so that no two share a prefix beyond `prefix_tokens`; outputs have their full length."""

    def __init__(
        self, clients: Sequence[Inference], vocab_size: int, seed: int, prefix_tokens: int, metadata: Metadata
    ) -> None:
        self._clients = clients
        self._metadata = metadata
        self._ids = min(vocab_size, _MAX_ID)
        self._rng = random.Random(seed)  # noqa: S311 - a load, no secret
        self._prefix = self._random_ids(prefix_tokens)
        self._sent = 0
        self._start = 0.0

    async def run_open(self, arrivals: Sequence[Arrival]) -> list[Sample]:
        """Send each request at its time, whatever has become of those before."""
        self._start = time.perf_counter()
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(self._start + arrival.arrival_s - time.perf_counter())
            tasks.append(asyncio.create_task(self._send(arrival, arrival.arrival_s)))
        return await asyncio.gather(*tasks)

    async def run_closed(self, shape: Arrival, concurrency: int, seconds: float) -> list[Sample]:
        """Keep `concurrency` requests of one shape in flight; after `seconds` those begun are finished, no more."""
        self._start = time.perf_counter()
        samples: list[Sample] = []

        async def user() -> None:
            while True:
                sample = await self._send(shape, self._now())
                samples.append(sample)
                if sample.retry_after_ms is not None:
                    await asyncio.sleep(sample.retry_after_ms / 1000)
                if self._now() >= seconds:
                    return

        async with asyncio.TaskGroup() as users:
            for _ in range(concurrency):
                users.create_task(user())
        return samples

    async def _send(self, arrival: Arrival, due_s: float) -> Sample:
        client = self._clients[self._sent % len(self._clients)]
        self._sent += 1
        request = self._request(arrival)
        sample = Sample(due_s, self._now())
        try:
            await self._read(client.Generate(request, metadata=self._metadata), sample)
        except grpc.aio.AioRpcError as error:
            sample.status = error.code().name
            sample.retry_after_ms = _retry_after_ms(error)
        sample.end_s = self._now()
        return sample

    async def _read(self, call: AsyncIterable[inference_pb2.GenerateResponse], sample: Sample) -> None:
        last = None
        async for response in call:
            if response.token_ids:
                now = self._now()
                if last is None:
                    sample.first_s = now
                else:
                    sample.gaps_s.append(now - last)
                last = now
                sample.output_tokens += len(response.token_ids)
            if response.HasField("finish"):
                sample.prompt_tokens = response.finish.usage.prompt_tokens

    def _request(self, arrival: Arrival) -> inference_pb2.GenerateRequest:
        ids = self._prefix[: arrival.prompt_tokens]
        ids = ids + self._random_ids(arrival.prompt_tokens - len(ids))
        sampling = inference_pb2.SamplingOptions(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True)
        return inference_pb2.GenerateRequest(prompt_ids=inference_pb2.TokenIds(ids=ids), sampling=sampling)

    def _random_ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._ids) for _ in range(count)]

    def _now(self) -> float:
        return time.perf_counter() - self._start


def _retry_after_ms(error: grpc.aio.AioRpcError) -> int | None:
    """From google.rpc.RetryInfo; None if the status has none."""
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return int(info.retry_delay.ToMilliseconds())
    return None


@contextlib.asynccontextmanager
async def connected(
    address: str,
    connections: int,
    seed: int,
    prefix_tokens: int,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    metadata: Metadata = (),
) -> AsyncIterator[LoadClient]:
    """A client with `connections` connections to a router. Raises DeployError: it does not serve."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with contextlib.AsyncExitStack() as stack:
        channels = [_channel(address, credentials, options) for _ in range(connections)]
        for channel in channels:
            await stack.enter_async_context(channel)
        clients = list(_clients(channels))
        try:
            model = await clients[0].GetModel(inference_pb2.GetModelRequest(), timeout=10, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise DeployError(f"{address}: {error.code().name}: {error.details()}") from None
        yield LoadClient(clients, model.vocab_size, seed, prefix_tokens, metadata)


def _channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: tuple[tuple[str, int], ...]
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


def _clients(channels: Sequence[grpc.aio.Channel]) -> Iterator[Inference]:
    return (inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels)
