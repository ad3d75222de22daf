"""Workers that die, hang or leave in mid-stream: every client gets what it would have got undisturbed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from glmserve.inference.v1 import inference_pb2 as pb
from tests.chaos.processes import Service, running_requests, services, wait_health, wait_idle
from tests.e2e.client import Answer, connect, request

STREAMS = 32
# Every stream has as many tokens before the disturbance.
BEFORE = 3
TOKENS = 32
# On a busy machine a worker may have answered everything before the disturbance reaches it.
ATTEMPTS = 8
# Of what may differ between two answers, nothing is compared but these.
COMPARED = ("text", "token_ids", "logprobs")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "top_p": 0.9, "ignore_eos": True, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 2, "frequency_penalty": 0.7, "min_tokens": TOKENS},
    {"temperature": 1.0, "top_k": 40, "min_tokens": 16, "stop": ["the", "of a"], "logprobs": 0},
)
BEGINNINGS = ("Once upon a time", "The capital of France is", "def main():", "Water boils at")


def requests() -> list[pb.GenerateRequest]:
    return [
        request(f"{BEGINNINGS[i % 4]} {i}", max_tokens=TOKENS, seed=i, **SAMPLINGS[i // 4 % 4]) for i in range(STREAMS)
    ]


@dataclass
class Cluster:
    """Two workers; `both` knows them both, `single` and `other` only the first."""

    workers: Sequence[Service]
    both: Service
    single: Service
    other: Service
    undisturbed: Sequence[Answer] = ()

    async def heal(self) -> None:
        """Everybody runs and serves."""
        for service in (*self.workers, self.both, self.single, self.other):
            service.signal(signal.SIGCONT)
            if service.process.poll() is not None:
                service.start()
        for service in (*self.workers, self.both, self.single, self.other):
            await wait_health(service.address, True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = ("--model", str(resolve_model(DEFAULT_MODEL)))

    def service(module: str, *args: str) -> Service:
        return Service(module, tmp_path_factory.mktemp(module), *model, *args)

    workers = [service("engine_worker", "--threads", "1", "--drain-seconds", "0") for _ in range(2)]
    with services(*workers):
        for worker in workers:
            worker.start()
        first, second = (worker.address for worker in workers)
        routers = [service("router", "--worker", first, *more) for more in (("--worker", second), (), ())]
        with services(*routers):
            for router in routers:
                router.start()
            both, single, other = routers
            yield Cluster(workers, both, single, other)


@pytest.fixture
async def cluster(running: Cluster) -> Cluster:
    await running.heal()
    if not running.undisturbed:
        running.undisturbed = await answers(running.both)
    return running


async def nothing() -> None:
    pass


async def answers(router: Service, disturb: Callable[[], Awaitable[None]] = nothing) -> list[Answer]:
    """Of all requests at once; `disturb` is called when every stream has its first tokens and none its last."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    async with connect(router.address) as client:

        async def one(number: int, given: pb.GenerateRequest) -> Answer:
            answer = Answer()
            async for response in client.Generate(given, timeout=110):
                answer.add(response)
                if len(answer.token_ids) >= BEFORE:
                    begun[number].set()
            return answer

        async def disturbance() -> None:
            for event in begun:
                await event.wait()
            await disturb()

        *found, _ = await asyncio.gather(*(one(i, given) for i, given in enumerate(requests())), disturbance())
    return [answer for answer in found if isinstance(answer, Answer)]


async def moved(cluster: Cluster, router: Service, disturb: Callable[[], Awaitable[None]]) -> list[dict[str, Any]]:
    """What the router logs of the requests that it moves; again where the disturbance came after all last tokens."""
    before = len(router.events("request_moved"))
    for _ in range(ATTEMPTS):
        check_equal(await answers(router, disturb), cluster.undisturbed)
        if events := router.events("request_moved")[before:]:
            return events
        await cluster.heal()
    raise AssertionError(f"no request was moved in {ATTEMPTS} attempts")


def check_equal(found: Sequence[Answer], undisturbed: Sequence[Answer]) -> None:
    assert len(found) == STREAMS
    for answer, wanted in zip(found, undisturbed, strict=True):
        for name in COMPARED:
            assert getattr(answer, name) == getattr(wanted, name)
        assert answer.finish.reason == wanted.finish.reason
        assert answer.finish.WhichOneof("stop") == wanted.finish.WhichOneof("stop")
        assert answer.finish.seed == wanted.finish.seed
        assert answer.finish.usage.prompt_tokens == wanted.finish.usage.prompt_tokens
        assert answer.finish.usage.completion_tokens == len(answer.token_ids)


async def test_kill_9_of_a_worker_with_32_streams_and_a_second_worker(cluster: Cluster) -> None:
    async def kill() -> None:
        await asyncio.to_thread(cluster.workers[1].kill)

    events = await moved(cluster, cluster.both, kill)
    assert {line["before"] for line in events} == {cluster.workers[1].address}
    assert {line["worker"] for line in events} == {cluster.workers[0].address}
    assert min(line["tokens"] for line in events) >= BEFORE
    await wait_idle(cluster.workers[0].address)


async def test_kill_9_of_the_only_worker_which_is_started_again_on_its_port(cluster: Cluster) -> None:
    async def restart() -> None:
        cluster.workers[0].kill()
        await asyncio.to_thread(cluster.workers[0].start)

    await moved(cluster, cluster.single, restart)
    await wait_idle(cluster.workers[0].address)


async def test_a_worker_that_is_stopped_is_given_up_and_comes_back_clean(cluster: Cluster) -> None:
    down_before = len(cluster.both.events("worker_down"))

    async def stop() -> None:
        cluster.workers[1].signal(signal.SIGSTOP)

    try:
        await moved(cluster, cluster.both, stop)
        assert "DEADLINE_EXCEEDED" in cluster.both.events("worker_down")[down_before]["reason"], "of the heartbeat"
    finally:
        cluster.workers[1].signal(signal.SIGCONT)
    await wait_idle(cluster.workers[1].address)
    await cluster.heal()


async def test_a_worker_that_drains_hands_over_what_it_cannot_finish(cluster: Cluster) -> None:
    codes: list[int] = []

    async def drain() -> None:
        # The router spreads requests as it sees fit: after what went before, one worker may have none.
        running = [await running_requests(worker.address) for worker in cluster.workers]
        leaving = cluster.workers[running.index(max(running))]
        codes.append(await asyncio.to_thread(leaving.stop))

    await moved(cluster, cluster.both, drain)
    assert set(codes) == {0}


async def test_kill_9_of_a_router_frees_the_pages_and_leaves_the_other_router_alone(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    long = request("The story of the sea", max_tokens=3000, ignore_eos=True)
    async with connect(cluster.other.address) as client:
        calls = [client.Generate(long) for _ in range(8)]
        for call in calls:
            await call.read()

        async def kill() -> None:
            await asyncio.to_thread(cluster.other.kill)

        check_equal(await answers(cluster.single, kill), cluster.undisturbed)
    await wait_idle(worker.address)
