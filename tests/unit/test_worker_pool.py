"""Links that come and go with the addresses that their sources name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from glmserve.engine.v1 import engine_pb2
from glmserve.service.status import UnavailableError
from glmserve.service.tls import Channels
from router.dispatch.worker_pool import PoolSettings, WorkerPool
from tests.unit.router_harness import VOCAB_SIZE, ScriptedWorker, running_worker

NAME = "dns:///workers.svc:50061"


class Names:
    """A name service. Each look-up takes the next answer; the last one stays."""

    def __init__(self, *answers: frozenset[str] | OSError) -> None:
        self._answers = list(answers)
        self.asked: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self, source: str) -> frozenset[str]:
        assert source == NAME
        self.asked.put_nowait(None)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer


@contextlib.asynccontextmanager
async def pool_of(names: Names, resolve_s: float = 0.01) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(PoolSettings([NAME], VOCAB_SIZE, 5.0, resolve_s), Channels(None), names)
    running = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def until(pool: WorkerPool, holds: Callable[[], bool]) -> None:
    while not holds():
        await pool.changed.wait_beyond(pool.changed.count)


async def until_serving(pool: WorkerPool, count: int) -> None:
    await until(pool, lambda: pool.num_serving == count)


async def test_workers_come_and_retire_with_the_name() -> None:
    first, second = ScriptedWorker(), ScriptedWorker()
    async with running_worker(first) as one, running_worker(second) as two:
        names = Names(frozenset((one,)))
        async with pool_of(names) as pool:
            await until_serving(pool, 1)
            assert pool.pick([1]).address == one
            running = pool.pick([1]).submit(engine_pb2.Submit(prompt_token_ids=[1]))[1]
            names._answers = [frozenset((two,))]
            await until(pool, lambda: pool.num_serving == 1 and pool.pick([1]).address == two)
            first.finish((await first.submits.get()).request_id, [5])
            assert (await running.read()).token_ids == [5], "what ran on the retired worker goes on"
            first.end_stream()
            await until(pool, lambda: one not in pool._links)
            names._answers = [frozenset((one, two))]
            await until_serving(pool, 2)


async def test_a_name_that_cannot_be_looked_up_keeps_its_workers() -> None:
    async with running_worker(ScriptedWorker()) as one:
        names = Names(frozenset((one,)), OSError("no such name"))
        async with pool_of(names) as pool:
            await until_serving(pool, 1)
            for _ in range(5):
                await names.asked.get()
            assert pool.num_serving == 1


async def test_a_name_that_was_never_found_is_told() -> None:
    names = Names(OSError("no such name"))
    async with pool_of(names) as pool:
        await names.asked.get()
        with pytest.raises(UnavailableError, match="no engine worker at dns:///workers.svc:50061"):
            pool.pick([1])


async def test_a_prompt_returns_to_its_worker_and_the_outlook_is_of_the_shortest_queue() -> None:
    workers = {}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            worker = ScriptedWorker()
            worker.info.page_size, worker.info.max_running_requests = 4, 8
            workers[await stack.enter_async_context(running_worker(worker))] = worker
        async with pool_of(Names(frozenset(workers))) as pool:
            await until_serving(pool, 3)
            prompts = [[number] * 9 for number in range(30)]
            chosen = [pool.pick(prompt).address for prompt in prompts]
            assert [pool.pick(prompt).address for prompt in prompts] == chosen
            assert len(set(chosen)) == 3
            assert pool.pick(prompts[0], avoid={chosen[0]}).address != chosen[0]
            assert pool.pick(prompts[0], avoid=set(workers)).address == chosen[0], "avoided, but there is no other"
            for waiting, worker in enumerate(workers.values()):
                load = engine_pb2.Load(
                    running_requests=8,
                    waiting_prompt_tokens=1000 * (waiting + 1),
                    prefill_tokens_per_s=1000,
                    decode_tokens_per_s=100,
                )
                worker.send(engine_pb2.ServeResponse(load=load))
            await until(pool, lambda: pool.outlook().total.decode_tokens_per_s == 300)
            outlook = pool.outlook()
            assert (outlook.queue_s, outlook.running) == (1.0, 8)
            pool.pick([9]).submit(engine_pb2.Submit(prompt_token_ids=[9] * 500))
            assert (
                sum(link.new_prompt_tokens for link in (link.session for link in pool._links.values()) if link) == 500
            )
