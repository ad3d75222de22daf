"""Pings: an eager client that keeps to the rules is never sent away, and one that does not is."""

from __future__ import annotations

import asyncio

import grpc

from tests.chaos.http2 import ACK, GOAWAY, PING, frame, raw
from tests.unit.router_harness import bench, wait_health

# Just above the least that a server allows, for long enough to earn the two strikes that it forgives and more.
_PAUSE_S = 0.55
_PINGS = 6
_EAGER = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


async def ping_by_hand(address: str) -> None:
    async with raw(address) as connection:
        for number in range(_PINGS):
            connection.send(frame(PING, payload=bytes((number,) * 8)))
            assert await connection.read_until(PING, 0, ACK) is not None, f"sent away at ping {number}"
            await asyncio.sleep(_PAUSE_S)  # the pause is what is tested


async def stay_connected(channel: grpc.aio.Channel) -> None:
    """Fails if the connection is given up, until it is cancelled."""
    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    raise AssertionError(f"the connection became {channel.get_state()}")


async def test_an_eager_client_keeps_its_connection_with_and_without_calls() -> None:
    async with bench() as b, grpc.aio.insecure_channel(b.router.address, options=_EAGER) as channel:
        await wait_health(channel, True)
        staying = asyncio.create_task(stay_connected(channel))
        await ping_by_hand(b.router.address)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        await wait_health(channel, True)
        assert not staying.done()
        staying.cancel()


async def test_a_flood_of_pings_ends_the_connection() -> None:
    async with bench() as b, raw(b.router.address) as connection:
        connection.send(*[frame(PING, payload=bytes(8))] * 50)
        goaway = await connection.read_until(GOAWAY)
        assert goaway is not None
        assert goaway.payload.endswith(b"too_many_pings")
        await connection.until_closed()
