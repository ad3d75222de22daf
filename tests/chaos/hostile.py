"""Clients that no one would write, each from its first byte to its end."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

from glmserve.inference.v1 import inference_pb2
from tests.chaos.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GENERATE,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    WINDOW_UPDATE,
    RawConnection,
    frame,
    header_block,
    message,
    raw,
    request_headers,
    settings,
)

Behaviour = Callable[[str], Awaitable[None]]

LONG = inference_pb2.GenerateRequest(
    prompt="The story of the sea",
    sampling=inference_pb2.SamplingOptions(temperature=0.0, max_tokens=40, ignore_eos=True),
).SerializeToString()


async def settled(connection: RawConnection) -> None:
    """The server has handled all that was sent before."""
    connection.send(frame(PING, payload=b"settled?"))
    while (found := await connection.read_until(PING, 0, ACK)) is not None:
        if found.payload == b"settled?":
            return


async def vanishes_in_mid_stream(address: str) -> None:
    async with raw(address) as connection:
        connection.send(request_headers(1), frame(DATA, END_STREAM, 1, message(LONG)))
        assert await connection.read_until(DATA, 1) is not None


async def vanishes_before_the_first_token(address: str) -> None:
    async with raw(address) as connection:
        connection.send(request_headers(1), frame(DATA, END_STREAM, 1, message(LONG)))
        assert await connection.read_until(HEADERS, 1) is not None


async def never_reads(address: str) -> None:
    """Many streams, and no window for any."""
    async with raw(address, PREFACE, settings(window=0), SETTINGS_ACK) as connection:
        for stream in range(1, 17, 2):
            connection.send(request_headers(stream), frame(DATA, END_STREAM, stream, message(LONG)))
            assert await connection.read_until(HEADERS, stream) is not None


async def half_closes_without_a_message(address: str) -> None:
    async with raw(address) as connection:
        connection.send(request_headers(1, flags=END_HEADERS | END_STREAM))
        await settled(connection)


async def half_closes_in_the_middle_of_a_message(address: str) -> None:
    async with raw(address) as connection:
        connection.send(request_headers(1), frame(DATA, END_STREAM, 1, message(LONG)[:-3]))
        await settled(connection)


async def sends_headers_and_nothing_else(address: str) -> None:
    async with raw(address) as connection:
        connection.send(*(request_headers(stream) for stream in range(1, 401, 2)))
        await settled(connection)


async def sends_garbage_instead_of_the_preface(address: str) -> None:
    async with raw(address, random.Random(7).randbytes(4096)) as connection:
        await connection.until_closed()


async def sends_garbage_frames(address: str) -> None:
    """Whole frames of every kind with random content; the server may close at any of them."""
    source = random.Random(11)
    for _ in range(64):
        async with raw(address) as connection:
            for _ in range(16):
                kind, flags, stream = source.randrange(12), source.randrange(256), source.randrange(4)
                connection.send(frame(kind, flags, stream, source.randbytes(source.choice((0, 4, 8, 40)))))
            connection.send(frame(PING, payload=bytes(7)))  # a size that ends any connection that still stands
            await connection.until_closed()


async def sends_a_frame_larger_than_allowed(address: str) -> None:
    async with raw(address) as connection:
        connection.send(request_headers(1), b"\xff\xff\xff" + frame(DATA, 0, 1)[3:] + bytes(1 << 16))
        await connection.until_closed()


async def announces_a_message_of_two_gigabytes(address: str) -> None:
    async with raw(address) as connection:
        connection.send(request_headers(1), frame(DATA, 0, 1, b"\x00\x7f\xff\xff\xff" + bytes(1000)))
        assert_status(await connection.read_until(HEADERS, 1), grpc.StatusCode.RESOURCE_EXHAUSTED)


async def sends_a_message_that_inflates(address: str) -> None:
    """48 KB that are 48 MB."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = b"".join([*(deflate.compress(bytes(1 << 20)) for _ in range(48)), deflate.flush()])
    packed = message(body, compressed=True)
    async with raw(address) as connection:
        connection.send(request_headers(1, extra=[("grpc-encoding", "gzip")]))
        connection.send(*(frame(DATA, 0, 1, packed[at : at + 16384]) for at in range(0, len(packed), 16384)))
        connection.send(frame(DATA, END_STREAM, 1))
        assert_status(await connection.read_until(HEADERS, 1), grpc.StatusCode.RESOURCE_EXHAUSTED)


async def sends_headers_without_end(address: str) -> None:
    field = b"\x00\x01a\x7e" + b"x" * 126
    async with raw(address) as connection:
        connection.send(frame(HEADERS, 0, 1, header_block(GENERATE)))
        connection.send(*(frame(CONTINUATION, 0, 1, field) for _ in range(2000)))
        connection.send(frame(CONTINUATION, END_HEADERS, 1))
        assert_status(await connection.read_until(HEADERS, 1), grpc.StatusCode.RESOURCE_EXHAUSTED)


async def resets_streams_as_fast_as_it_opens_them(address: str) -> None:
    async with raw(address) as connection:
        for stream in range(1, 4001, 2):
            connection.send(request_headers(stream), frame(RST_STREAM, 0, stream, bytes(4)))
        await settled(connection)


async def floods_with_pings(address: str) -> None:
    async with raw(address) as connection:
        connection.send(*[frame(PING, payload=bytes(8))] * 100)
        goaway = await connection.read_until(GOAWAY)
        assert goaway is None or goaway.payload.endswith(b"too_many_pings")


async def floods_with_settings(address: str) -> None:
    async with raw(address) as connection:
        connection.send(*[frame(SETTINGS)] * 20_000)
        await settled(connection)


async def opens_the_window_beyond_its_limit(address: str) -> None:
    async with raw(address) as connection:
        connection.send(*[frame(WINDOW_UPDATE, payload=b"\x7f\xff\xff\xff")] * 8)
        connection.send(frame(PING, payload=bytes(7)))
        await connection.until_closed()


async def connects_and_says_nothing(address: str) -> None:
    host, _, port = address.rpartition(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
    for _, writer in connections:
        writer.transport.abort()


BEHAVIOURS: list[Behaviour] = [
    vanishes_in_mid_stream,
    vanishes_before_the_first_token,
    never_reads,
    half_closes_without_a_message,
    half_closes_in_the_middle_of_a_message,
    sends_headers_and_nothing_else,
    sends_garbage_instead_of_the_preface,
    sends_garbage_frames,
    sends_a_frame_larger_than_allowed,
    announces_a_message_of_two_gigabytes,
    sends_a_message_that_inflates,
    sends_headers_without_end,
    resets_streams_as_fast_as_it_opens_them,
    floods_with_pings,
    floods_with_settings,
    opens_the_window_beyond_its_limit,
    connects_and_says_nothing,
]


def assert_status(found: object, code: grpc.StatusCode) -> None:
    """The trailers have that status: their block is HPACK, in which grpc-status is a literal or an indexed value."""
    assert found is not None, "the server closed the connection"
    payload: bytes = found.payload  # type: ignore[attr-defined]
    assert b"grpc-status" in payload and str(code.value[0]).encode() in payload, payload


def open_files(pid: int | str = "self") -> int:
    return sum(1 for _ in Path("/proc", str(pid), "fd").iterdir())
