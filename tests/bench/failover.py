"""How long streams stand still when their worker dies or hangs and a second one is up.

`python -m tests.bench.failover` kills (SIGKILL) and stops (SIGSTOP) one of two workers in mid-stream, on the embedded
model, and prints the longest silence of the streams that were moved. It writes build/bench/failover.json.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from pathlib import Path

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from tests.bench.machine import BUILD
from tests.chaos.processes import Service, services, wait_health
from tests.e2e.client import connect, request

STREAMS = 8
TOKENS = 96
# Every stream has as many tokens before the disturbance.
BEFORE = 8
REPEATS = 3


async def gaps(router: Service, victim: Service, number: signal.Signals) -> list[float]:
    """Of each stream, the longest time between two messages, seconds; `victim` gets the signal when all have begun."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    async with connect(router.address) as stub:

        async def one(index: int) -> float:
            tokens, longest, last = 0, 0.0, time.perf_counter()
            async for response in stub.Generate(request(f"Story {index}:", max_tokens=TOKENS, ignore_eos=True)):
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


async def measure(directory: Path, number: signal.Signals) -> dict[str, object]:
    """Two workers of one thread each, so that one does not slow the other down on a small machine."""
    model = ("--model", str(resolve_model(DEFAULT_MODEL)))

    def service(name: str, module: str, *args: str) -> Service:
        (directory / name).mkdir()
        return Service(module, directory / name, *model, *args)

    workers = [service(f"worker{index}", "engine_worker", "--threads", "1") for index in range(2)]
    with services(*workers):
        for worker in workers:
            worker.start()
        router = service("router", "router", *(f"--worker={worker.address}" for worker in workers))
        with services(router):
            router.start()
            for each in (*workers, router):
                await wait_health(each.address, serving=True)
            found = await gaps(router, workers[0], number)
            moved = len(router.events("request_moved"))
    return {"moved": moved, "gap_s": round(max(found), 2)}


def main() -> None:
    """Measure, print, write."""
    result: dict[str, list[dict[str, object]]] = {}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as directory:
                result.setdefault(number.name, []).append(asyncio.run(measure(Path(directory), number)))
            print(number.name, result[number.name][-1], flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "failover.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
