"""Workers of different sizes: a request goes where it fits, also when its worker is lost; and its age goes with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc
import pytest

from glmserve.inference.v1 import inference_pb2
from tests.unit.router_harness import encode, step
from tests.unit.test_failover import Cluster, cluster, failure, request, rest

SMALL, LARGE = 64, 200
PARIS = encode(" Paris")


@contextlib.asynccontextmanager
async def small_and_large(**pages: int) -> AsyncIterator[Cluster]:
    """The second of two workers has a larger context, or with `pages` the first has few of them."""
    async with cluster(failover_wait_s=0.05) as c:
        small, large = c.workers
        large.info.max_context = LARGE
        for name, value in pages.items():
            setattr(small.info, name, value)
        for worker in c.workers:
            worker.connected.clear()
            worker.end_stream()
        for worker in c.workers:
            await worker.connected.wait()
        pool = c.router._pool
        while pool.num_serving < 2 or pool.longest != LARGE:
            await pool.changed.wait_beyond(pool.changed.count)
        yield c


async def test_a_request_goes_where_it_fits() -> None:
    async with small_and_large() as c:
        small, large = c.workers
        for worker in c.workers:
            worker.answer = lambda submit: [step(submit.request_id, PARIS, "LENGTH")]
        for _ in range(8):
            await rest(c.client.Generate(request(max_tokens=LARGE // 2)))
        assert (small.submits.qsize(), large.submits.qsize()) == (0, 8)
        small.answer = large.answer = None
        calls = [c.client.Generate(request(max_tokens=8)) for _ in range(8)]
        # All are open at once, and nobody gets more than its share: who is smaller is asked for what fits.
        await small.submits.get()
        for call in calls:
            call.cancel()


async def test_what_fits_nowhere_is_told_the_largest_limit() -> None:
    async with small_and_large() as c:
        prompt = inference_pb2.TokenIds(ids=[5] * LARGE)
        for bad, room in (
            (inference_pb2.GenerateRequest(prompt_ids=prompt), f"allowed: 1 to {LARGE - 1} tokens"),
            (request(max_tokens=LARGE), f"the context of {LARGE}"),
        ):
            error = await failure(c.client.Generate(bad))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert room in (error.details() or "")
        assert (await c.client.GetModel(inference_pb2.GetModelRequest())).max_context == LARGE


async def test_without_max_tokens_the_context_is_that_of_the_largest() -> None:
    async with small_and_large() as c:
        call, submit, worker, _ = await c.begin()
        assert worker is c.workers[1]
        assert len(submit.prompt_token_ids) + submit.sampling.max_tokens == LARGE
        call.cancel()


async def test_pages_limit_a_worker_as_its_context_does() -> None:
    async with small_and_large(max_context=LARGE, total_pages=2, page_size=16) as c:
        large = c.servers[id(c.workers[1])].address
        # The last token needs no place in a page.
        for max_tokens, longest in ((30, 33), (31, LARGE)):
            assert c.router._pool.pick([9] * 3, max_tokens=max_tokens, avoid={large}).longest == longest


async def test_what_does_not_fit_the_only_one_left_waits_and_then_is_told_why() -> None:
    async with small_and_large() as c:
        call, _, worker, _ = await c.begin(max_tokens=LARGE // 2)
        assert worker is c.workers[1]
        await c.kill(worker)
        assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE
        assert c.workers[0].submits.empty()
        error = await failure(c.client.Generate(request(max_tokens=LARGE // 2)))
        assert error.code() == grpc.StatusCode.UNAVAILABLE, "it will fit again"
        assert f"it takes at most {SMALL} tokens" in (error.details() or "")


async def test_the_next_worker_is_told_the_age_which_is_its_place_in_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    later_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    monkeypatch.setattr("router.dispatch.request_run.time", clock)
    async with cluster() as c:
        call, submit, first, second = await c.begin()
        assert second is not None
        assert submit.age_ms < 1000
        later_s = 7.0
        await c.kill(first)
        assert (await second.submits.get()).age_ms >= 7000
        call.cancel()
