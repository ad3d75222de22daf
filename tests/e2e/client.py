"""A grpc.aio client of the public API, as short as the tests need it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from glmserve.inference.v1 import inference_pb2 as pb
from glmserve.inference.v1 import inference_pb2_grpc as rpc

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client


@dataclass
class Answer:
    """A finished Generate: what its messages add up to."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    messages: int = 0
    finish: pb.Finish = field(default_factory=pb.Finish)

    def add(self, response: pb.GenerateResponse) -> None:
        self.text += response.text
        self.token_ids += response.token_ids
        self.logprobs += response.logprobs
        self.messages += 1
        if response.HasField("finish"):
            self.finish = response.finish


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield rpc.InferenceServiceStub(channel)


def request(prompt: str | list[int], **sampling: Any) -> pb.GenerateRequest:
    """Greedy unless `sampling` has a temperature."""
    sampling.setdefault("temperature", 0.0)
    options = pb.SamplingOptions(**sampling)
    if isinstance(prompt, str):
        return pb.GenerateRequest(prompt=prompt, sampling=options)
    return pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=prompt), sampling=options)


async def generate(client: Client, prompt: str | list[int], **sampling: Any) -> Answer:
    answer = Answer()
    async for response in client.Generate(request(prompt, **sampling)):
        answer.add(response)
    return answer
