"""Many short requests, a third of them cancelled at random: afterwards nothing is kept of any.

`make soak` runs 20,000; `make test` runs 1,000 of the same (test_soak.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from glmserve.inference.v1 import inference_pb2_grpc
from tests.bench.machine import memory_mb
from tests.chaos.processes import Service, services, wait_health, wait_idle
from tests.e2e.client import generate, request

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client

CONCURRENCY = 48
CANCELLED_SHARE = 0.33
# The worker checks its books once it has been idle for 50 ms.
_IDLE_S = 0.2
# Of asyncio's executor, which starts a thread when all are busy. A thread kept for each request would be hundreds.
_LATE_THREADS = min(32, (os.cpu_count() or 1) + 4)


@dataclass(frozen=True)
class Held:
    """What a process holds. MB are 10^6 bytes, of private memory."""

    anon_mb: float
    files: int
    threads: int


def held(service: Service) -> Held:
    process = Path("/proc") / str(service.process.pid)
    files, threads = (sum(1 for _ in (process / name).iterdir()) for name in ("fd", "task"))
    return Held(memory_mb(service.process.pid, "RssAnon"), files, threads)


@dataclass
class Pair:
    worker: Service
    router: Service

    async def settled(self) -> dict[str, Held]:
        """What both hold when nothing has run for a while: the least seen, because connections close late."""
        until = time.monotonic() + _IDLE_S
        looks: dict[str, list[Held]] = {"worker": [], "router": []}
        while time.monotonic() < until:
            await wait_idle(self.worker.address)
            looks["worker"].append(held(self.worker))
            looks["router"].append(held(self.router))
        least = {name: zip(*map(astuple, seen), strict=True) for name, seen in looks.items()}
        return {name: Held(*(min(column) for column in columns)) for name, columns in least.items()}


@asynccontextmanager
async def pair(model: Path, directory: Path) -> AsyncIterator[Pair]:
    """A worker and a router that serve; killed at the end if they still run."""
    for name in ("worker", "router"):
        (directory / name).mkdir()
    worker = Service("engine_worker", directory / "worker", "--model", str(model), "--log-level", "warning")
    with services(worker):
        worker.start()
        flags = ("--model", str(model), "--worker", worker.address, "--log-level", "warning")
        router = Service("router", directory / "router", *flags)
        with services(router):
            router.start()
            await wait_health(router.address, serving=True)
            yield Pair(worker, router)


class Crowd:
    """Sends short requests, CONCURRENCY at a time, over one connection that stays open. `outcomes` counts the ends."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def send(self, requests: int) -> None:
        left = requests

        async def user() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                self.outcomes[await self._one()] += 1

        async with asyncio.TaskGroup() as users:
            for _ in range(CONCURRENCY):
                users.create_task(user())

    async def _one(self) -> str:
        rng = self._rng
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 4))]
        call = self._client.Generate(request(prompt, max_tokens=rng.randint(1, 3), ignore_eos=True))
        reads = rng.randint(0, 1) if rng.random() < CANCELLED_SHARE else None
        try:
            while reads is None or reads > 0:
                if await call.read() is grpc.aio.EOF:
                    return "OK"
                reads = None if reads is None else reads - 1
            call.cancel()
            code: grpc.StatusCode = await call.code()
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return code.name


@dataclass(frozen=True)
class Result:
    """`rounds`: what worker and router hold, idle, after each. `same_text`: a greedy answer has not changed."""

    outcomes: Counter[str]
    rounds: list[dict[str, Held]]
    same_text: bool
    exit_codes: tuple[int, int]


async def soak(model: Path, directory: Path, requests: int, rounds: int) -> Result:
    """Run a round to warm up, and then `rounds` of `requests` requests each, against a pair of its own."""
    async with pair(model, directory) as running, grpc.aio.insecure_channel(running.router.address) as channel:
        client: Client = inference_pb2_grpc.InferenceServiceStub(channel)
        text = (await generate(client, "The capital of France is", max_tokens=8)).text
        crowd = Crowd(client, seed=5)
        seen = []
        for _ in range(1 + rounds):
            await crowd.send(requests)
            seen.append(await running.settled())
            print(sum(crowd.outcomes.values()), "requests:", seen[-1], file=sys.stderr)
        again = (await generate(client, "The capital of France is", max_tokens=8)).text
        exit_codes = (running.router.stop(), running.worker.stop())
    return Result(crowd.outcomes, seen, text == again, exit_codes)


def check(result: Result, growth_mb: float) -> None:
    """Raises AssertionError. `growth_mb`: in the second half, when allocators have seen all that they ever need."""
    assert set(result.outcomes) <= {"OK", "CANCELLED"}, result.outcomes
    assert result.outcomes["OK"] > result.outcomes.total() / 2
    assert result.outcomes["CANCELLED"] > result.outcomes.total() / 10
    assert result.same_text
    assert result.exit_codes == (0, 0), "a worker whose books do not balance exits with 1"
    for name, after in result.rounds[-1].items():
        before, half = result.rounds[0][name], result.rounds[len(result.rounds) // 2][name]
        assert after.files <= before.files, f"{name}: {before} -> {after}"
        assert after.threads <= before.threads + _LATE_THREADS, f"{name}: {before} -> {after}"
        assert after.anon_mb - half.anon_mb <= growth_mb, f"{name}: {half} -> {after}"


def main() -> None:
    """`python -m tests.chaos.soak [REQUESTS]`: in ten rounds."""
    rounds = 10
    requests = (int(sys.argv[1]) if len(sys.argv) > 1 else 20_000) // rounds
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(soak(resolve_model(DEFAULT_MODEL), Path(directory), requests, rounds))
    print(f"{result.outcomes.total()} requests in {time.monotonic() - start:.0f} s: {dict(result.outcomes)}")
    for name in ("worker", "router"):
        first, half, last = (result.rounds[index][name] for index in (0, rounds // 2, rounds))
        slope = (last.anon_mb - half.anon_mb) / (requests * (rounds - rounds // 2)) * 1e6
        print(f"{name}: {first} -> {last}; private memory in the second half: {slope:+.0f} bytes a request")
    check(result, growth_mb=6)


if __name__ == "__main__":
    main()
