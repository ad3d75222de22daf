"""Requests that outlive their worker, worker by worker as the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2, inference_pb2_grpc
from glmserve.service.grpc_server import GrpcServer
from glmserve.service.telemetry import Telemetry
from router.config import RouterConfig
from router.dispatch.breaker import FAILURES_TO_OPEN
from router.server import Router
from tests.unit.router_harness import EOS, ScriptedWorker, encode, start_worker, step, text_model, wait_health

PARIS = encode(" Paris")


@dataclass
class Cluster:
    """`first` got the request that `begin` sent, `second` did not."""

    workers: list[ScriptedWorker]
    servers: dict[int, GrpcServer]
    client: Any
    channel: grpc.aio.Channel
    router: Router

    async def begin(self, **sampling: Any) -> tuple[Any, engine_pb2.Submit, ScriptedWorker, ScriptedWorker | None]:
        """A call, its submit, the worker that has it, and the other one."""
        call = self.client.Generate(request(**sampling))
        waits = {asyncio.create_task(worker.submits.get()): worker for worker in self.workers}
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        [task] = done
        others = [worker for worker in self.workers if worker is not waits[task]]
        return call, task.result(), waits[task], others[0] if others else None

    async def kill(self, worker: ScriptedWorker) -> None:
        await self.servers[id(worker)].server.stop(None)

    async def restart(self, worker: ScriptedWorker) -> None:
        self.servers[id(worker)] = await start_worker(worker, self.servers[id(worker)].address)


def request(**sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt="The capital of France is", sampling=inference_pb2.SamplingOptions(**sampling)
    )


@contextlib.asynccontextmanager
async def cluster(count: int = 2, **settings: Any) -> AsyncIterator[Cluster]:
    workers = [ScriptedWorker() for _ in range(count)]
    servers = {id(worker): await start_worker(worker) for worker in workers}
    addresses = ",".join(server.address for server in servers.values())
    given: Any = {"listen": "127.0.0.1:0", "worker": addresses, **settings}
    router = await Router.start(RouterConfig(model=Path("unused"), **given), text_model(), Telemetry())
    async with grpc.aio.insecure_channel(router.address) as channel:
        try:
            for worker in workers:
                await worker.connected.wait()
            await wait_health(channel, True)
            while router._pool.num_serving < count:
                await router._pool.changed.wait_beyond(router._pool.changed.count)
            client: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            yield Cluster(workers, servers, client, channel, router)
        finally:
            await router.stop()
            for server in servers.values():
                await server.server.stop(None)


async def rest(call: Any) -> tuple[str, list[int], inference_pb2.Finish]:
    """Text, ids and finish of what is left of a call."""
    text, ids, finish = "", [], inference_pb2.Finish()
    while (response := await call.read()) is not grpc.aio.EOF:
        text += response.text
        ids += response.token_ids
        finish = response.finish
    return text, ids, finish


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value


async def test_another_worker_goes_on_from_the_tokens_so_far() -> None:
    async with cluster() as c:
        call, submit, first, second = await c.begin(max_tokens=20, temperature=0.7, min_tokens=3, logprobs=1)
        assert second is not None
        assert submit.sampling.HasField("seed")
        first.send(with_logprobs(submit.request_id, PARIS))
        assert list((await call.read()).token_ids) == PARIS
        await c.kill(first)
        again = await second.submits.get()
        assert list(again.generated_token_ids) == PARIS
        assert again.sampling == submit.sampling
        assert again.prompt_token_ids == submit.prompt_token_ids
        assert again.priority == submit.priority
        second.send(with_logprobs(again.request_id, encode("!")), step(again.request_id, (), "LENGTH"))
        responses = []
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
        assert [entry.token_id for response in responses for entry in response.logprobs] == encode("!")
        assert "".join(response.text for response in responses) == "!"
        assert responses[-1].finish.usage.completion_tokens == len(PARIS) + 1
        assert responses[-1].finish.seed == submit.sampling.seed
        timings = responses[-1].finish.timings
        assert timings.queue_us <= timings.first_token_us


def with_logprobs(request_id: int, ids: list[int]) -> engine_pb2.ServeResponse:
    response = step(request_id, ids)
    response.outputs[0].logprobs.extend(engine_pb2.TokenLogprobs(logprob=-1.0) for _ in ids)
    return response


async def test_a_character_that_is_not_whole_survives_the_move() -> None:
    cut = encode("日本")
    async with cluster() as c:
        call, submit, first, second = await c.begin(max_tokens=20)
        assert second is not None
        first.tokens(submit.request_id, cut[:1])
        first_text = (await call.read()).text
        await c.kill(first)
        again = await second.submits.get()
        second.finish(again.request_id, cut[1:])
        assert first_text + (await rest(call))[0] == "日本"


async def test_a_stop_string_may_begin_before_the_move_and_end_after_it() -> None:
    async with cluster() as c:
        call, submit, first, second = await c.begin(max_tokens=20, stop=["xyz"])
        assert second is not None
        first.tokens(submit.request_id, encode("ab") + encode("x"))
        assert (await call.read()).text == "ab"
        await c.kill(first)
        again = await second.submits.get()
        second.tokens(again.request_id, encode("y") + encode("z"))
        assert await second.aborts.get() == again.request_id
        second.finish(again.request_id, reason="ABORTED")
        text, _, finish = await rest(call)
        assert (text, finish.stop_string) == ("", "xyz")


async def test_a_worker_that_hands_over_is_left_with_its_usage() -> None:
    async with cluster() as c:
        call, submit, first, second = await c.begin(max_tokens=20)
        assert second is not None
        usage = engine_pb2.Usage(cached_prompt_tokens=2, completion_tokens=len(PARIS), queue_us=7)
        first.finish(submit.request_id, PARIS, "UNAVAILABLE", usage=usage)
        again = await second.submits.get()
        assert list(again.generated_token_ids) == PARIS
        late = engine_pb2.Usage(cached_prompt_tokens=5, completion_tokens=99, queue_us=10**12)
        second.finish(again.request_id, encode("."), "LENGTH", usage=late)
        text, ids, finish = await rest(call)
        assert (text, ids) == (" Paris.", [*PARIS, *encode(".")])
        assert finish.usage.cached_prompt_tokens == 2
        assert finish.usage.completion_tokens == len(ids)


@pytest.mark.parametrize(
    ("sampling", "ids", "reason"),
    [
        ({"max_tokens": len(PARIS)}, PARIS, inference_pb2.FINISH_REASON_LENGTH),
        ({"max_tokens": 20}, [*PARIS, EOS], inference_pb2.FINISH_REASON_STOP),
        ({"max_tokens": 20, "stop_token_ids": PARIS[-1:], "ignore_eos": True}, PARIS, inference_pb2.FINISH_REASON_STOP),
    ],
)
async def test_a_finish_that_was_lost_is_made_up(sampling: dict[str, Any], ids: list[int], reason: int) -> None:
    async with cluster() as c:
        call, submit, first, second = await c.begin(**sampling)
        assert second is not None
        first.tokens(submit.request_id, ids)
        assert list((await call.read()).token_ids) == ids
        await c.kill(first)
        _, more, finish = await rest(call)
        assert (more, finish.reason) == ([], reason)
        assert finish.usage.completion_tokens == len(ids)
        assert finish.seed == submit.sampling.seed
        assert second.submits.empty()


async def test_the_number_of_moves_is_bounded() -> None:
    async with cluster(failover_moves=1) as c:
        call, _, first, second = await c.begin()
        assert second is not None
        await c.kill(first)
        await second.submits.get()
        await c.kill(second)
        assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_worker_that_comes_back_takes_over_its_own_request() -> None:
    async with cluster(1) as c:
        call, submit, only, _ = await c.begin(max_tokens=20)
        only.tokens(submit.request_id, PARIS)
        await call.read()
        await c.kill(only)
        await wait_health(c.channel, False)
        await c.restart(only)
        again = await only.submits.get()
        assert list(again.generated_token_ids) == PARIS
        only.finish(again.request_id, encode("!"))
        assert (await rest(call))[0] == "!"


async def test_without_a_worker_the_wait_is_bounded_and_so_is_the_deadline() -> None:
    async with cluster(1, failover_wait_s=0.05) as c:
        call, _, only, _ = await c.begin()
        await c.kill(only)
        assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE
        await c.restart(only)
        await wait_health(c.channel, True)
    async with cluster(1) as c:
        call = c.client.Generate(request(), timeout=1.0)
        await c.workers[0].submits.get()
        await c.kill(c.workers[0])
        assert (await failure(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_the_next_worker_is_told_what_is_left_of_the_deadline() -> None:
    async with cluster() as c:
        call = c.client.Generate(request(), timeout=60)
        tasks = [asyncio.create_task(worker.submits.get()) for worker in c.workers]
        done, [pending] = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        [submit] = (task.result() for task in done)
        await c.kill(c.workers[0 if tasks[0] in done else 1])
        assert 0 < (await pending).timeout_ms < submit.timeout_ms
        call.cancel()


async def test_a_cancel_while_no_worker_is_there_leaves_nothing_behind() -> None:
    async with cluster(1) as c:
        call, submit, only, _ = await c.begin()
        only.tokens(submit.request_id, PARIS)
        await call.read()
        await c.kill(only)
        await wait_health(c.channel, False)
        call.cancel()
        await c.router._admission.wait_idle()
        await c.restart(only)
        await wait_health(c.channel, True)
        other = c.client.Generate(request())
        assert not (await only.submits.get()).generated_token_ids, "only the new request was sent"
        other.cancel()


def rejection(request_id: int, reason: str, retry_after_ms: int = 0) -> engine_pb2.ServeResponse:
    response = engine_pb2.ServeResponse()
    response.rejections.add(
        request_id=request_id,
        reason=f"REJECTION_REASON_{reason}",
        field="prompt_token_ids",
        message="no",
        retry_after_ms=retry_after_ms,
    )
    return response


@pytest.mark.parametrize("reason", ["UNAVAILABLE", "OVERLOADED"])
async def test_what_one_worker_does_not_take_another_may(reason: str) -> None:
    async with cluster() as c:
        call, submit, first, second = await c.begin()
        assert second is not None
        first.send(rejection(submit.request_id, reason))
        second.finish((await second.submits.get()).request_id, PARIS)
        assert (await rest(call))[0] == " Paris"


async def test_a_worker_that_ends_is_not_asked_again_before_it_is_back() -> None:
    async with cluster(1) as c:
        call, submit, only, _ = await c.begin(max_tokens=20)
        only.finish(submit.request_id, PARIS, "UNAVAILABLE")
        assert (await call.read()).text == " Paris"
        only.connected.clear()
        only.end_stream()
        await only.connected.wait()
        again = await only.submits.get()
        assert list(again.generated_token_ids) == PARIS
        assert only.seen == {1}, "asked once by the new stream, whose first id it is, and not by the old one"
        only.finish(again.request_id, encode("!"))
        assert (await rest(call))[0] == "!"


async def test_a_request_that_all_workers_refuse_is_refused_with_the_last_delay() -> None:
    async with cluster() as c:
        call, submit, first, second = await c.begin()
        assert second is not None
        first.send(rejection(submit.request_id, "OVERLOADED", 100))
        second.send(rejection((await second.submits.get()).request_id, "OVERLOADED", 2500))
        error = await failure(call)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        assert status is not None
        info = error_details_pb2.RetryInfo()
        status.details[0].Unpack(info)
        assert info.retry_delay.ToMilliseconds() == 2500


async def test_what_was_begun_waits_for_a_full_worker() -> None:
    async with cluster() as c:
        call, submit, first, second = await c.begin(max_tokens=20)
        assert second is not None
        first.tokens(submit.request_id, PARIS)
        await call.read()
        await c.kill(first)
        second.send(rejection((await second.submits.get()).request_id, "OVERLOADED", 20))
        again = await second.submits.get()
        assert list(again.generated_token_ids) == PARIS
        second.finish(again.request_id, encode("!"))
        assert (await rest(call))[0] == "!"


async def test_a_worker_of_another_revision_does_not_go_on() -> None:
    async with cluster(failover_wait_s=0.05) as c:
        c.workers[1].info.model_revision = "r2"
        c.workers[1].connected.clear()
        c.workers[1].end_stream()
        await c.workers[1].connected.wait()
        await wait_health(c.channel, True)
        call, _, first, second = await c.begin()
        assert second is not None
        await c.kill(first)
        assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE
        assert second.submits.empty()


async def test_text_that_a_stop_string_ended_needs_no_last_word() -> None:
    async with cluster() as c:
        call, submit, first, second = await c.begin(stop=["Par"])
        assert second is not None
        first.tokens(submit.request_id, PARIS)
        await first.aborts.get()
        await c.kill(first)
        text, _, finish = await rest(call)
        assert (text, finish.stop_string) == (" ", "Par")
        assert second.submits.empty()


async def test_a_stuck_engine_is_left_although_its_port_answers() -> None:
    async with cluster() as c:
        for worker in c.workers:
            worker.info.step_timeout_ms = 500
            worker.connected.clear()
            worker.end_stream()
        for worker in c.workers:
            await worker.connected.wait()
        await wait_health(c.channel, True)
        call, _, first, second = await c.begin()
        assert second is not None
        first.send(engine_pb2.ServeResponse(load=engine_pb2.Load(running_requests=1, step_age_ms=501)))
        second.finish((await second.submits.get()).request_id, PARIS)
        assert (await rest(call))[0] == " Paris"


async def test_a_worker_that_fails_requests_gets_no_more_and_one_that_clients_misuse_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.dispatch.breaker._MIN_OPEN_S", 60.0)
    async with cluster() as c:
        call, submit, first, second = await c.begin()
        assert second is not None
        first.finish(submit.request_id, reason="NUMERICAL_ERROR")
        assert (await failure(call)).code() == grpc.StatusCode.INTERNAL
        first.answer = lambda submit: [step(submit.request_id, (), "NUMERICAL_ERROR")]
        second.answer = lambda submit: [rejection(submit.request_id, "INVALID")]
        codes = [(await failure(c.client.Generate(request()))).code() for _ in range(3 * FAILURES_TO_OPEN)]
        opened = FAILURES_TO_OPEN - 1
        assert codes[:opened] == [grpc.StatusCode.INTERNAL] * opened
        assert codes[opened:] == [grpc.StatusCode.INVALID_ARGUMENT] * (len(codes) - opened)
        assert c.router._pool.num_serving == 1
