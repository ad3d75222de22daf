"""Requests through the real dispatch and the real worker service, whose engines die at random steps in every way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from random import Random

import pytest

from engine_worker.errors import DeviceError
from engine_worker.runtime.records import Sampling
from glmserve.engine.v1 import engine_pb2
from glmserve.service.tls import Channels
from router.dispatch.request_run import FailoverLimits, RequestRun
from router.dispatch.worker_pool import PoolSettings, WorkerPool
from tests.unit.scripted_engine import VOCAB, undisturbed
from tests.unit.worker_harness import running_worker

REQUESTS = 16
TOKENS = 60


class Host:
    """Runs one worker after the other at one address. Each ends at a random step: cut off, failed, or drained."""

    def __init__(self, rng: Random) -> None:
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.deaths = 0
        self._rng = rng
        self._ending = False
        self._due = asyncio.Event()

    def end(self) -> None:
        """`run` is to return."""
        self._ending = True
        self._due.set()

    async def run(self) -> None:
        listen = "127.0.0.1:0"
        while not self._ending:
            async with running_worker(listen=listen) as worker:
                listen = worker.address
                if not self.address.done():
                    self.address.set_result(listen)
                way, last = self._rng.choice(("cut off", "failed", "drained")), self._rng.randrange(2, 25)
                self._due.clear()
                worker.engine.before_collect = dies(last, way == "failed", self._due)
                await self._due.wait()
                if self._ending:
                    return
                self.deaths += 1
                if way == "cut off":
                    for session in list(worker.service._sessions.values()):
                        session.close()
                elif way == "drained":
                    await worker.service.drain(0)
                    await asyncio.to_thread(worker.loop.stop)


def dies(last: int, fails: bool, due: asyncio.Event) -> Callable[[int], None]:
    """For the engine's thread: `due` is set at step `last`, which then fails or not."""
    event_loop = asyncio.get_running_loop()

    def before(step: int) -> None:
        if step == last:
            event_loop.call_soon_threadsafe(due.set)
            if fails:
                raise DeviceError("device lost")

    return before


async def run_request(pool: WorkerPool, rng: Random, number: int) -> None:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
    sampling = Sampling(seed=number, prompt_len=len(prompt), presence_penalty=rng.choice((0.0, 0.5)))
    wanted = undisturbed(prompt, sampling, TOKENS)
    params = engine_pb2.SamplingParams(
        max_tokens=TOKENS, seed=number, ignore_eos=True, logprobs=0, presence_penalty=sampling.presence_penalty
    )
    submit = engine_pb2.Submit(prompt_token_ids=prompt, sampling=params)
    while not pool.num_serving:
        await pool.changed.wait_beyond(pool.changed.count)
    run = RequestRun(pool, submit, f"r-{number}", lambda: None, FailoverLimits(moves=30, wait_s=60))
    found, logprobs = [], []
    while True:
        chunk = await run.read()
        found += chunk.token_ids
        logprobs += [-entry.logprob for entry in chunk.logprobs]
        if chunk.finish is not None:
            break
    run.release()
    assert found == wanted
    assert logprobs == wanted, "each token's own"
    assert chunk.finish.reason == engine_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_gets_its_tokens_whatever_dies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dispatch.breaker.FAILURES_TO_OPEN", 10**9)
    rng = Random(seed)
    hosts = [Host(rng) for _ in range(2)]
    running = [asyncio.create_task(host.run()) for host in hosts]
    addresses = [await host.address for host in hosts]
    pool = WorkerPool(PoolSettings(addresses, VOCAB, 5.0, 60.0), Channels(None))
    links = asyncio.create_task(pool.run())
    try:
        for first in itertools.count(0, REQUESTS):
            await asyncio.gather(*(run_request(pool, rng, first + number) for number in range(REQUESTS)))
            if sum(host.deaths for host in hosts) > 4:
                break
    finally:
        links.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await links
        for host in hosts:
            host.end()
        await asyncio.gather(*running)
