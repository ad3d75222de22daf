"""A burst beyond what is allowed: the rest is refused at once with a delay, and nobody accepted notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from tests.chaos.processes import Service, services, wait_health, wait_idle
from tests.e2e.client import Answer, connect, generate

PLACES = 8
BURST = 64
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Service]]:
    model = ("--model", str(resolve_model(DEFAULT_MODEL)))

    def directory() -> Path:
        return tmp_path_factory.mktemp("service")

    worker = Service("engine_worker", directory(), *model, "--max-running", "4")
    with services(worker):
        worker.start()
        # 9 of 10 places are open to requests of priority 0.
        router = Service("router", directory(), *model, "--worker", worker.address, "--max-requests", str(PLACES + 1))
        with services(router):
            router.start()
            yield worker, router


def delay_ms(error: grpc.aio.AioRpcError) -> int:
    """What the refusal says of when to try again."""
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    return int(info.retry_delay.ToMilliseconds())


async def test_a_burst_is_refused_beyond_the_limit_and_the_accepted_get_their_tokens(
    pair: tuple[Service, Service],
) -> None:
    worker, router = pair
    await wait_health(router.address, True)
    order: list[str] = []
    async with connect(router.address) as stub:
        undisturbed = await generate(stub, PROMPT, max_tokens=24, ignore_eos=True)

        async def one() -> Answer | grpc.aio.AioRpcError:
            try:
                answer = await generate(stub, PROMPT, max_tokens=24, ignore_eos=True)
                order.append("answered")
                return answer
            except grpc.aio.AioRpcError as error:
                order.append("refused")
                return error

        found = await asyncio.gather(*(one() for _ in range(BURST)))
        accepted = [answer for answer in found if isinstance(answer, Answer)]
        refused = [error for error in found if isinstance(error, grpc.aio.AioRpcError)]
        assert len(accepted) >= PLACES
        assert len(refused) >= BURST - 2 * PLACES
        assert order[: len(refused)] == ["refused"] * len(refused), "a refusal waits for nobody"
        assert all(answer.token_ids == undisturbed.token_ids for answer in accepted)
        assert all(delay_ms(error) > 0 for error in refused)
        await wait_idle(worker.address)
        assert (await generate(stub, PROMPT, max_tokens=24, ignore_eos=True)).token_ids == undisturbed.token_ids
