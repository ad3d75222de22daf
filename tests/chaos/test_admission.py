"""What cannot be done is refused at once with a delay: beyond a limit, or too late. Nobody accepted notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from glmserve.engine.v1 import engine_pb2
from tests.chaos.processes import Service, engine, services, wait_health, wait_idle
from tests.e2e.client import Answer, connect, generate, request

PLACES = 8
RUNNING = 4
BURST = 64
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Service]]:
    model = ("--model", str(resolve_model(DEFAULT_MODEL)))

    def directory() -> Path:
        return tmp_path_factory.mktemp("service")

    worker = Service("engine_worker", directory(), *model, "--max-running", str(RUNNING))
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
    async with connect(router.address) as client:
        undisturbed = await generate(client, PROMPT, max_tokens=24, ignore_eos=True)

        async def one() -> Answer | grpc.aio.AioRpcError:
            try:
                answer = await generate(client, PROMPT, max_tokens=24, ignore_eos=True)
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
        assert (await generate(client, PROMPT, max_tokens=24, ignore_eos=True)).token_ids == undisturbed.token_ids


@pytest.mark.parametrize("waiting", [0, PLACES - RUNNING])
async def test_what_cannot_meet_its_deadline_is_refused_at_once(pair: tuple[Service, Service], waiting: int) -> None:
    """Without a queue because its own tokens take too long, with one because the queue alone outlasts the deadline."""
    worker, router = pair
    await wait_health(router.address, True)
    async with connect(router.address) as client, engine(worker.address) as engine_client:
        # A full engine measures its pace.
        await asyncio.gather(*(generate(client, PROMPT, max_tokens=64, ignore_eos=True) for _ in range(PLACES)))
        load = (await engine_client.GetLoad(engine_pb2.GetLoadRequest())).load
        place_s = load.tokens_per_request / load.decode_tokens_per_s
        long = request(PROMPT, max_tokens=3000, ignore_eos=True)
        running = [client.Generate(long) for _ in range(RUNNING)]
        for call in running:
            await call.read()
        running += [client.Generate(long) for _ in range(waiting)]
        # All but the newest have their place; a queue is before it, or it generates for longer than its deadline: twice
        # as long and more, because the pace is measured on and on.
        tokens, timeout_s = (1, waiting * place_s / 2) if waiting else (3000, 3000 * place_s / load.tokens_per_request)
        while (await engine_client.GetLoad(engine_pb2.GetLoadRequest())).load.waiting_requests < waiting:
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in client.Generate(request(PROMPT, max_tokens=tokens, ignore_eos=True), timeout=timeout_s):
                raise AssertionError("it was begun")
        assert delay_ms(caught.value) > 0
        assert "deadline" in (caught.value.details() or "")
        for call in running:
            call.cancel()
    await wait_idle(worker.address)
