"""From what the settings name to the addresses of workers."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

DNS_SCHEME = "dns:///"

Resolver = Callable[[str], Awaitable[frozenset[str]]]


def is_name(source: str) -> bool:
    """Whether `source` is to be looked up: dns:///NAME:PORT."""
    return source.startswith(DNS_SCHEME)


async def resolve(source: str) -> frozenset[str]:
    """The addresses behind a source, HOST:PORT each. Raises OSError: the name has none now."""
    if not is_name(source):
        return frozenset((source,))
    host, _, port = source.removeprefix(DNS_SCHEME).rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return frozenset(_address(str(entry[4][0]), int(port)) for entry in found)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ipaddress.ip_address(host.partition("%")[0]).version == 6 else f"{host}:{port}"
