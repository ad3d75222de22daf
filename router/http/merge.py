"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(
    streams: Sequence[AsyncIterator[T]], ended: Sequence[Callable[[], None]]
) -> AsyncIterator[tuple[int, T]]:
    """What any of `streams` yields, with its number; a failure of one ends all. `ended`: called when one is at its end.

    No stream is read ahead by more than one item, so each merges at its source what its reader cannot take yet.
    """
    queue: asyncio.Queue[tuple[int, T | Exception | None]] = asyncio.Queue(maxsize=1)

    async def feed(number: int) -> None:
        try:
            async for item in streams[number]:
                await queue.put((number, item))
        except Exception as error:
            await queue.put((number, error))
        else:
            ended[number]()
            await queue.put((number, None))

    tasks = [asyncio.create_task(feed(number)) for number in range(len(streams))]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
