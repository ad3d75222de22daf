"""Errors that carry a gRPC status, and the one interceptor that sends them.

ServiceError
 +- InvalidArgumentError    INVALID_ARGUMENT    google.rpc.BadRequest names the field
 +- NotFoundError           NOT_FOUND
 +- UnauthenticatedError    UNAUTHENTICATED
 +- PermissionDeniedError   PERMISSION_DENIED
 +- OverloadedError         RESOURCE_EXHAUSTED  google.rpc.RetryInfo says when to try again
 +- DeadlineError           DEADLINE_EXCEEDED
 +- UnavailableError        UNAVAILABLE
 +- InternalError           INTERNAL            google.rpc.RequestInfo carries the id that the log has
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

log = structlog.get_logger()


class ServiceError(Exception):
    """Base: a message for the client, a status code, typed details."""

    code = grpc.StatusCode.UNKNOWN

    def details(self) -> Sequence[Message]:
        """google.rpc details that go with the status."""
        return ()

    def trailers(self) -> Sequence[tuple[str, str]]:
        """Metadata that goes with the status."""
        return ()


class InvalidArgumentError(ServiceError):
    """The client's value is not allowed: `field` is its path; the text has the value and what is allowed."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description

    def details(self) -> Sequence[Message]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.description)
        return (error_details_pb2.BadRequest(field_violations=[violation]),)


class NotFoundError(ServiceError):
    """What the client names does not exist here."""

    code = grpc.StatusCode.NOT_FOUND


class UnauthenticatedError(ServiceError):
    """The caller did not show who they are."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(ServiceError):
    """The caller is known, and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class OverloadedError(ServiceError):
    """No room now; `retry_after_ms` says when to try again, `reason` names the limit for metrics."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_ms: int, reason: str) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.reason = reason

    def details(self) -> Sequence[Message]:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromMilliseconds(self.retry_after_ms)
        return (info,)

    def trailers(self) -> Sequence[tuple[str, str]]:
        """A gRPC client with a retry policy waits this long (gRFC A6), instead of by its own backoff."""
        return (("grpc-retry-pushback-ms", str(self.retry_after_ms)),)


class DeadlineError(ServiceError):
    """The client's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class UnavailableError(ServiceError):
    """Draining, down, or no worker."""

    code = grpc.StatusCode.UNAVAILABLE


class InternalError(ServiceError):
    """Our fault."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, error_id: str) -> None:
        super().__init__(f"{message} (error id {error_id})")
        self.error_id = error_id

    def details(self) -> Sequence[Message]:
        return (error_details_pb2.RequestInfo(request_id=self.error_id),)


def to_status(error: ServiceError) -> grpc.Status:
    """The rich status that `context.abort_with_status` takes."""
    packed = []
    for detail in error.details():
        item = any_pb2.Any()
        item.Pack(detail)
        packed.append(item)
    proto = status_pb2.Status(code=error.code.value[0], message=str(error), details=packed)
    status: Any = rpc_status.to_status(proto)
    made: grpc.Status = status._replace(trailing_metadata=(*status.trailing_metadata, *error.trailers()))
    return made


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps ServiceError to its status. What else escapes a handler is logged with an id and becomes INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        inner = behaviour(handler)
        guard: Callable[..., Any] = _guard_stream if handler.response_streaming else _guard_unary
        return with_behaviour(handler, guard(inner, method), handler.request_deserializer)


def behaviour(handler: grpc.RpcMethodHandler[Any, Any]) -> Any:
    """The function that a handler calls, whichever of the four kinds it is."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def with_behaviour(
    handler: grpc.RpcMethodHandler[Any, Any],
    function: Callable[..., Any],
    request_deserializer: Callable[[bytes], Any] | None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind that calls `function`; without a deserialiser it is given the bytes."""
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    made: grpc.RpcMethodHandler[Any, Any] = make(function, request_deserializer, handler.response_serializer)
    return made


def _guard_unary(inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(request, context)
        except Exception as error:
            await _abort(context, error, method)

    return call


def _guard_stream(inner: Callable[..., Any], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            responses = inner(request, context)
            if inspect.isawaitable(responses):  # a handler that writes through the context, as health's Watch does
                await responses
                return
            async for response in responses:
                yield response
        except Exception as error:
            await _abort(context, error, method)

    return call


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, ServiceError):
        error_id = uuid.uuid4().hex
        log.error("unhandled_error", method=method, error_id=error_id, exc_info=error)
        error = InternalError("internal error", error_id)
    await context.abort_with_status(to_status(error))
