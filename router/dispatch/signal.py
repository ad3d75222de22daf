"""Something that many tasks may wait for, again and again, without missing a time."""

from __future__ import annotations

import asyncio


class Signal:
    """A counter of events; a waiter says up to which count it knows."""

    def __init__(self) -> None:
        self.count = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        """Wake everybody."""
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait_beyond(self, count: int) -> None:
        """Return once `fire` has been called more than `count` times."""
        if self.count > count:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
