"""How long streams stand still when their worker dies or hangs and a second one is up; how long a dead router's stay.

`python -m tests.bench.failover` kills (SIGKILL) and stops (SIGSTOP) one of two workers in mid-stream, on the embedded
model, and prints the longest silence of a stream. Then it kills a router, and prints when its worker has given back all
pages. It writes build/bench/failover.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from tests.bench.machine import BUILD
from tests.chaos.processes import Service, services, wait_health, wait_idle
from tests.e2e.client import connect, request

STREAMS = 8
TOKENS = 96
# Every stream has as many tokens before the disturbance.
BEFORE = 8
REPEATS = 3
_TICK_S = 0.05


async def gaps(router: Service, victim: Service, number: signal.Signals) -> list[float]:
    """Of each stream, the longest time between two messages, seconds; `victim` gets the signal when all have begun."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    async with connect(router.address) as client:

        async def one(index: int) -> float:
            tokens, longest, last = 0, 0.0, time.perf_counter()
            async for response in client.Generate(request(f"Story {index}:", max_tokens=TOKENS, ignore_eos=True)):
                now = time.perf_counter()
                longest, last = (max(longest, now - last) if tokens else 0.0), now
                tokens += len(response.token_ids)
                if tokens >= BEFORE:
                    begun[index].set()
            assert tokens == TOKENS
            return longest

        async def disturb() -> None:
            for event in begun:
                await event.wait()
            victim.signal(number)

        *found, _ = await asyncio.gather(*(one(index) for index in range(STREAMS)), disturb())
    return [gap for gap in found if gap is not None]


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[list[Service], Service]]:
    """Two workers of one thread each, so that one does not slow the other down on a small machine, and a router."""
    model = ("--model", str(resolve_model(DEFAULT_MODEL)))
    with tempfile.TemporaryDirectory() as directory:

        def service(name: str, module: str, *args: str) -> Service:
            (Path(directory) / name).mkdir()
            return Service(module, Path(directory) / name, *model, *args)

        workers = [service(f"worker{index}", "engine_worker", "--threads", "1") for index in range(2)]
        with services(*workers):
            for worker in workers:
                worker.start()
            router = service("router", "router", *(f"--worker={worker.address}" for worker in workers))
            with services(router):
                router.start()
                for each in (*workers, router):
                    await wait_health(each.address, serving=True)
                yield workers, router


async def worker_lost(number: signal.Signals) -> dict[str, float]:
    """`moved`: requests that went on elsewhere; `gap_s`: the longest silence; `own_gap_s`: ours, for other reasons."""
    async with cluster() as (workers, router):
        late: list[float] = []
        clock = asyncio.create_task(tick(late))
        found = await gaps(router, workers[0], number)
        clock.cancel()
        moved = len(router.events("request_moved"))
        return {"moved": moved, "gap_s": round(max(found), 2), "own_gap_s": round(max(late), 2)}


async def tick(late: list[float]) -> None:
    """Note how much later than asked for this process was woken, for as long as it lasts."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        late.append(time.perf_counter() - start - _TICK_S)


async def router_lost() -> dict[str, float]:
    """`pages_s`: from its death until no worker holds a page of its requests."""
    async with cluster() as (workers, router), connect(router.address) as client:
        calls = [
            client.Generate(request(f"Story {index}:", max_tokens=3000, ignore_eos=True)) for index in range(STREAMS)
        ]
        for call in calls:
            await call.read()
        router.kill()
        start = time.perf_counter()
        for worker in workers:
            await wait_idle(worker.address)
        return {"pages_s": round(time.perf_counter() - start, 2)}


def main() -> None:
    """Measure, print, write."""
    cases: dict[str, Callable[[], Coroutine[Any, Any, dict[str, float]]]] = {
        "worker killed": lambda: worker_lost(signal.SIGKILL),
        "worker stopped": lambda: worker_lost(signal.SIGSTOP),
        "router killed": router_lost,
    }
    result: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for name, measure in cases.items():
        for _ in range(REPEATS):
            result[name].append(asyncio.run(measure()))
            print(name, result[name][-1], flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "failover.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
