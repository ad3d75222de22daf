"""Whatever a client sends, it gets an answer or is told what is wrong; nothing is ever our fault, and others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from glmserve.inference.v1 import inference_pb2
from router.service import SERVICE
from tests.fuzzing import damaged, fuzz, messages
from tests.unit.router_harness import Bench, bench, encode, step

METHODS = list(SERVICE.methods)
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    # What the checkpoint or the engine cannot do.
    grpc.StatusCode.UNIMPLEMENTED,
}


@dataclass
class Router:
    """A router that is asked from outside its event loop, one RPC at a time."""

    runner: asyncio.Runner
    bench: Bench

    def call(self, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
        """The status of an RPC whose request is `data`."""
        return self.runner.run(self._call(method, data))

    async def _call(self, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
        rpc: Any = self.bench.channel.unary_stream(f"/{SERVICE.full_name}/{method}")
        try:
            async for _ in rpc(data, timeout=30):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with asyncio.Runner() as runner:
        context = bench()
        started = runner.run(context.__aenter__())
        started.worker.answer = lambda submit: [step(submit.request_id, encode("Paris"), "LENGTH")]
        yield Router(runner, started)
        runner.run(context.__aexit__(None, None, None))


def check(router: Router, method: MethodDescriptor, data: bytes) -> None:
    code, details = router.call(method.name, data)
    assert code in EXPECTED, (code, details)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        assert details.partition(":")[0], "names the field"
        assert len(details) < 1000
    good = inference_pb2.GenerateRequest(prompt="x").SerializeToString()
    assert router.call("Generate", good)[0] is grpc.StatusCode.OK


@st.composite
def requests(draw: st.DrawFn) -> tuple[MethodDescriptor, Message]:
    method = draw(st.sampled_from(METHODS))
    return method, draw(messages(method.input_type))


@fuzz(150)
@given(requests())
def test_any_message_of_the_right_type(router: Router, request_: tuple[MethodDescriptor, Message]) -> None:
    method, message = request_
    check(router, method, message.SerializeToString())


@fuzz(150)
@given(st.sampled_from(METHODS), damaged(requests().map(lambda drawn: drawn[1].SerializeToString())))
def test_any_bytes(router: Router, method: MethodDescriptor, data: bytes) -> None:
    check(router, method, data)
