"""glmserve.inference.v1.InferenceService: the core's gRPC front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeAlias

import grpc

from glmserve.inference.v1 import inference_pb2
from glmserve.service import identity
from router.inference import InferenceCore

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class InferenceService:
    """Handlers, one method an RPC (`router.wire.register`)."""

    def __init__(self, core: InferenceCore) -> None:
        self._core = core

    def generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Continue a prompt."""
        return self._core.generate(request, _GrpcCall(context))

    def chat(self, request: inference_pb2.ChatRequest, context: _Context) -> AsyncIterator[inference_pb2.ChatResponse]:
        """Answer a conversation."""
        return self._core.chat(request, _GrpcCall(context))

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        """Text to ids."""
        return await self._core.tokenize(request, _GrpcCall(context))

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        """Ids to text."""
        return await self._core.detokenize(request, _GrpcCall(context))

    async def get_model(
        self, request: inference_pb2.GetModelRequest, _context: _Context
    ) -> inference_pb2.GetModelResponse:
        """What is served, as the worker tells."""
        return await self._core.get_model(request)


class _GrpcCall:
    """A `router.call.Call` over gRPC; to be made in the RPC's own task, in which the interceptor left the caller."""

    protocol: Final = "grpc"

    def __init__(self, context: _Context) -> None:
        self._context = context
        self.caller = identity.current()

    @property
    def headers(self) -> Mapping[str, str]:
        metadata = self._context.invocation_metadata() or ()
        return {name: value for name, value in metadata if isinstance(value, str)}

    def time_remaining(self) -> float | None:
        return self._context.time_remaining()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._context.add_done_callback(lambda _context: callback())  # type: ignore[arg-type]

    async def accept(self, headers: Mapping[str, str]) -> None:
        await self._context.send_initial_metadata(tuple(headers.items()))
