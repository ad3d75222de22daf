"""Requests off the wire. What does not parse is the client's fault, and is said so.

gRPC answers a failing deserialiser with INTERNAL, so ours never fails: it returns `Malformed`, which handlers refuse.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from glmserve.service.status import InvalidArgumentError
from router.stall import StallWatch

_SNIPPET_BYTES = 16


@dataclass(frozen=True)
class Malformed:
    """Stands for a request that does not parse."""

    error: InvalidArgumentError


@dataclass(frozen=True, slots=True)
class StreamPace:
    """`stall_s`: a response that its client does not take for so long ends the RPC.

    `interval_s`: least time between two responses of a stream, 0 for none.
    """

    stall_s: float
    interval_s: float


def register(service: ServiceDescriptor, implementation: object, server: grpc.aio.Server, pace: StreamPace) -> None:
    """Serve each method of `service` by the method of `implementation` with its name in snake case."""
    handlers = {}
    for method in service.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handler = _refuse_malformed(getattr(implementation, _snake_case(method.name)))
        handlers[method.name] = make(
            _paced(handler, pace) if method.server_streaming else handler,
            request_deserializer=_parser(method.input_type),
            response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _refuse_malformed(handler: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def call(request: Message | Malformed, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, Malformed):
            raise request.error
        return handler(request, context)

    return call


def _paced(handler: Callable[[Any, Any], Any], pace: StreamPace) -> Callable[[Any, Any], AsyncIterator[Any]]:
    """What `handler` yields, at the pace of the stream. While it waits here, the handler's source merges."""

    async def call(request: Message | Malformed, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        watch = StallWatch(pace.stall_s)
        try:
            async for response in handler(request, context):
                sent = watch.sending()
                yield response  # resumed once the client's flow control has let it out
                watch.sent()
                if pace.interval_s and not response.HasField("finish"):
                    await asyncio.sleep(sent + pace.interval_s - watch.now())
        finally:
            watch.close()

    return call


def _parser(descriptor: Descriptor) -> Callable[[bytes], Message | Malformed]:
    message_class = message_factory.GetMessageClass(descriptor)

    def parse(data: bytes) -> Message | Malformed:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return Malformed(_explain(descriptor, data))

    return parse


def _explain(descriptor: Descriptor, data: bytes) -> InvalidArgumentError:
    """Find the string that is not UTF-8, by parsing again with every string taken as bytes."""
    twin = _bytes_twin(descriptor)
    try:
        found = _find_invalid_text(twin.FromString(data), descriptor, "")
    except DecodeError:
        found = None
    return found or InvalidArgumentError("request", f"{len(data)} bytes that are no {descriptor.full_name} message")


def _bytes_twin(descriptor: Descriptor) -> type[Message]:
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.file.CopyToProto(file)
    for message in file.message_type:
        for field in message.field:
            if field.type == field.TYPE_STRING:
                field.type = field.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _find_invalid_text(message: Message, descriptor: Descriptor, prefix: str) -> InvalidArgumentError | None:
    for twin, value in message.ListFields():
        original = descriptor.fields_by_name[twin.name]
        for path, item in _items(prefix + twin.name, twin, value):
            if original.type == FieldDescriptor.TYPE_STRING:
                found = _check_text(path, item)
            elif original.message_type is not None:
                found = _find_invalid_text(item, original.message_type, f"{path}.")
            else:
                found = None
            if found is not None:
                return found
    return None


def _items(path: str, field: FieldDescriptor, value: Any) -> list[tuple[str, Any]]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return []  # no map here has text in it
    if field.is_repeated:
        return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return [(path, value)]


def _check_text(path: str, data: bytes) -> InvalidArgumentError | None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        start = max(0, error.start - _SNIPPET_BYTES // 2)
        snippet = data[start : start + _SNIPPET_BYTES]
        return InvalidArgumentError(path, f"invalid UTF-8 at byte {error.start} ({snippet!r}); text must be UTF-8")
    return None
