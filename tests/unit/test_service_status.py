"""Every way for a handler to fail, as the client sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from glmserve.inference.v1 import inference_pb2 as pb
from glmserve.inference.v1 import inference_pb2_grpc as rpc
from glmserve.service import status
from glmserve.service.grpc_server import start_server

NAME = "glmserve.inference.v1.InferenceService"


class Failing(rpc.InferenceServiceServicer):
    """Raises `error` from a unary and, after one message, from a streaming method."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        raise self.error

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="before")
        raise self.error

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.ChatResponse]:
        raise self.error
        yield

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        raise self.error

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        raise self.error


async def call_unary(client: rpc.InferenceServiceAsyncStub) -> None:
    await client.Tokenize(pb.TokenizeRequest())


async def call_stream(client: rpc.InferenceServiceAsyncStub) -> None:
    texts = []
    try:
        async for response in client.Generate(pb.GenerateRequest()):
            texts.append(response.text)
    finally:
        assert texts == ["before"]


async def failure(
    error: Exception, call: Callable[[rpc.InferenceServiceAsyncStub], Awaitable[None]]
) -> grpc.aio.AioRpcError:
    started = await start_server(
        lambda server: rpc.add_InferenceServiceServicer_to_server(Failing(error), server),
        [NAME],
        "127.0.0.1:0",
        1 << 20,
    )
    try:
        async with grpc.aio.insecure_channel(started.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(rpc.InferenceServiceStub(channel))
        return caught.value
    finally:
        await started.server.stop(None)


@pytest.mark.parametrize("call", [call_unary, call_stream])
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            status.InvalidArgumentError("top_p", "1.5 is not in (0, 1]"),
            "INVALID_ARGUMENT",
            "top_p: 1.5 is not in (0, 1]",
        ),
        (status.NotFoundError("no model 'x'"), "NOT_FOUND", "no model 'x'"),
        (status.OverloadedError("queue full", 1500, "requests"), "RESOURCE_EXHAUSTED", "queue full"),
        (status.DeadlineError("too late"), "DEADLINE_EXCEEDED", "too late"),
        (status.UnavailableError("draining"), "UNAVAILABLE", "draining"),
    ],
)
async def test_service_errors_keep_their_code_and_text(
    error: Exception, code: str, message: str, call: Callable[[rpc.InferenceServiceAsyncStub], Awaitable[None]]
) -> None:
    seen = await failure(error, call)
    assert (seen.code().name, seen.details()) == (code, message)


async def test_an_unexpected_error_is_internal_with_an_id_and_no_detail_of_ours() -> None:
    seen = await failure(ZeroDivisionError("secret"), call_stream)
    assert seen.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (seen.details() or "")
    info = detail_of(seen, error_details_pb2.RequestInfo())
    assert info.request_id in (seen.details() or "")


async def test_overload_says_when_to_retry() -> None:
    seen = await failure(status.OverloadedError("queue full", 1500, "requests"), call_unary)
    assert detail_of(seen, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds() == 1500


async def test_bad_request_names_the_field() -> None:
    seen = await failure(status.InvalidArgumentError("sampling.top_p", "1.5 is not in (0, 1]"), call_unary)
    violation = detail_of(seen, error_details_pb2.BadRequest()).field_violations[0]
    assert (violation.field, violation.description) == ("sampling.top_p", "1.5 is not in (0, 1]")


def detail_of(error: grpc.aio.AioRpcError, into: Any) -> Any:
    found = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert found is not None
    assert found.details[0].Unpack(into)
    return into
