"""HTTP/2 frames by hand: what no gRPC library would send."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4  # the setting
GENERATE = "/glmserve.inference.v1.InferenceService/Generate"


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(**values: int) -> bytes:
    """`window=0`: the client takes no data."""
    pairs = [struct.pack(">HI", INITIAL_WINDOW, values["window"])] if "window" in values else []
    return frame(SETTINGS, payload=b"".join(pairs))


# The server's settings are acknowledged unread: it waits a minute for that, and then gives the connection up.
SETTINGS_ACK = frame(SETTINGS, ACK)


def header_block(path: str, *extra: tuple[str, str]) -> bytes:
    """A request's headers as HPACK literals without indexing."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *extra,
    ]
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def _text(value: str) -> bytes:
    data = value.encode()
    assert len(data) < 127
    return bytes((len(data),)) + data


def request_headers(
    stream: int, path: str = GENERATE, flags: int = END_HEADERS, extra: Sequence[tuple[str, str]] = ()
) -> bytes:
    return frame(HEADERS, flags, stream, header_block(path, *extra))


def message(data: bytes, *, compressed: bool = False) -> bytes:
    """gRPC's prefix and the message."""
    return struct.pack(">BI", compressed, len(data)) + data


class RawConnection:
    """A connection that has sent the preface and what the test wants it to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, *data: bytes) -> None:
        """Without waiting: the peer may read or not."""
        self._writer.write(b"".join(data))

    async def read(self) -> Frame | None:
        """The next frame; None at the end."""
        try:
            head = await self._reader.readexactly(9)
            length = int.from_bytes(head[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            return Frame(kind, flags, stream, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def read_until(self, kind: int, stream: int = 0, flag: int = 0) -> Frame | None:
        """The next frame of that kind, stream and flag; None if the peer closes before."""
        while (found := await self.read()) is not None:
            if found.kind == kind and found.stream == stream and found.flags & flag == flag:
                return found
        return None

    async def until_closed(self) -> None:
        """Until the peer closes."""
        while await self.read() is not None:
            pass

    def vanish(self) -> None:
        """Without a word: the socket is reset."""
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def raw(address: str, *first: bytes) -> AsyncIterator[RawConnection]:
    """A connection that begins with `first`; without, with the preface, empty settings and their acknowledgement."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connection = RawConnection(reader, writer)
    connection.send(*(first or (PREFACE, settings(), SETTINGS_ACK)))
    try:
        yield connection
    finally:
        connection.vanish()
