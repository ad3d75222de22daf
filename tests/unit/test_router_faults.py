"""What goes wrong in mid-request: cancels, deadlines, slow readers, lost and draining workers, overload."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from router.access.keys import key_hash, new_key
from router.dispatch.serve_session import CREDIT_WINDOW
from tests.unit.router_harness import MAX_CONTEXT, Bench, bench, byte_ids, encode, step


def generate(prompt: str = "The capital", **sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt=prompt, sampling=inference_pb2.SamplingOptions(**sampling))


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The status that the call ends with; what came before is dropped."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return caught.value


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    message = kind()
    assert status.details[0].Unpack(message)
    return message


async def check_works(b: Bench) -> None:
    """A fresh request gets its answer."""
    b.worker.answer = lambda submit: [step(submit.request_id, encode("fine"), "LENGTH")]
    response = await b.client.Generate(generate()).read()
    assert response.text == "fine"
    b.worker.answer = None


async def test_a_cancel_reaches_the_worker_and_others_go_on() -> None:
    async with bench() as b:
        gone, other = b.client.Generate(generate("a")), b.client.Generate(generate("b"))
        submits = {
            tuple(submit.prompt_token_ids): submit for submit in [await b.worker.submits.get() for _ in range(2)]
        }
        first, second = submits[tuple(encode("a"))], submits[tuple(encode("b"))]
        b.worker.tokens(first.request_id, encode("x"))
        await gone.read()
        gone.cancel()
        assert await b.worker.aborts.get() == first.request_id
        b.worker.finish(first.request_id, encode("late"), "ABORTED")
        b.worker.finish(second.request_id, encode("y"))
        assert (await other.read()).text == "y"


async def test_a_deadline_goes_to_the_worker_and_its_passing_aborts() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(), timeout=1.0)
        submit = await b.worker.submits.get()
        assert 0 < submit.timeout_ms <= 1100  # gRPC rounds a deadline up on the wire
        assert (await failure(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert await b.worker.aborts.get() == submit.request_id


async def test_the_workers_timeout_is_the_clients_deadline() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(), timeout=60)
        b.worker.finish((await b.worker.submits.get()).request_id, reason="TIMEOUT")
        assert (await failure(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_reader_that_lags_gets_merged_messages_and_all_ids() -> None:
    async with bench() as b:
        big = inference_pb2.TokenIds(ids=encode("a"))
        call = b.client.Generate(inference_pb2.GenerateRequest(prompt_ids=big))
        request_id = (await b.worker.submits.get()).request_id
        steps, ids = 5_000, byte_ids(b"abcdefgh")
        for _ in range(steps):
            b.worker.tokens(request_id, ids)
        await check_works(b)  # behind those steps in the worker's stream: the slow reader holds nobody up
        b.worker.finish(request_id)
        responses = []
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
        assert sum(len(response.token_ids) for response in responses) == steps * len(ids)
        assert "".join(response.text for response in responses) == "abcdefgh" * steps
        assert len(responses) < steps / 2


async def test_a_cancel_while_a_write_is_blocked_reaches_the_worker() -> None:
    async with bench() as b:
        call = b.client.Generate(generate())
        request_id = (await b.worker.submits.get()).request_id
        for _ in range(2_000):
            b.worker.tokens(request_id, byte_ids(b"x" * 200))
        await check_works(b)
        call.cancel()
        assert await b.worker.aborts.get() == request_id


async def test_credit_is_given_as_responses_are_taken() -> None:
    async with bench() as b:
        call = b.client.Generate(generate())
        request_id = (await b.worker.submits.get()).request_id
        assert b.worker.credit == CREDIT_WINDOW
        for _ in range(CREDIT_WINDOW):
            b.worker.tokens(request_id, encode("a"))
        await check_works(b)
        await check_works(b)  # its submit was sent with, or after, the new credit
        assert b.worker.credit >= 2 * CREDIT_WINDOW
        call.cancel()


async def test_a_lost_worker_ends_requests_unavailable_and_a_restart_heals() -> None:
    async with bench(failover_moves=0) as b:
        calls = [b.client.Generate(generate()) for _ in range(4)]
        for _ in calls:
            b.worker.tokens((await b.worker.submits.get()).request_id, encode("x"))
        first = await calls[0].read()
        assert first.text == "x"
        await b.stop_worker()
        for call in calls:
            assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE
        await b.wait_health(False)
        error = await failure(b.client.Generate(generate()))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "no engine worker at" in str(error.details())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await b.client.GetModel(inference_pb2.GetModelRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await b.start_worker()
        await b.wait_health(True)
        await check_works(b)


async def test_a_stream_that_ends_is_opened_again() -> None:
    async with bench(failover_moves=0) as b:
        call = b.client.Generate(generate())
        await b.worker.submits.get()
        b.worker.connected.clear()
        b.worker.end_stream()
        assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE
        await b.worker.connected.wait()
        await b.wait_health(True)
        await check_works(b)


async def test_a_worker_that_drains_gets_nothing_new_and_finishes_what_runs() -> None:
    async with bench() as b:
        call = b.client.Generate(generate())
        request_id = (await b.worker.submits.get()).request_id
        await b.worker_server.set_serving(False)
        await b.wait_health(False)
        assert (await failure(b.client.Generate(generate()))).code() == grpc.StatusCode.UNAVAILABLE
        b.worker.finish(request_id, encode("done"))
        assert (await call.read()).text == "done"
        await b.worker_server.set_serving(True)
        await b.wait_health(True)
        await check_works(b)


async def test_a_load_that_says_draining_counts_as_not_serving() -> None:
    async with bench() as b:
        b.worker.send(engine_pb2.ServeResponse(load=engine_pb2.Load(draining=True)))
        await b.wait_health(False)


async def test_a_silent_worker_is_asked_and_given_up_when_it_does_not_answer() -> None:
    async with bench(heartbeat_s=0.05, failover_moves=0) as b:
        for _ in range(3):
            await b.worker.load_polls.get()
        call = b.client.Generate(generate())
        await b.worker.submits.get()
        b.worker.answers_load = False
        assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_worker_with_another_model_is_not_used() -> None:
    async with bench() as b:
        b.worker.info.vocab_size += 1
        b.worker.end_stream()
        await b.wait_health(False)
        error = await failure(b.client.Generate(generate()))
        assert error.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE),
        ("NUMERICAL_ERROR", grpc.StatusCode.INTERNAL),
        ("ABORTED", grpc.StatusCode.INTERNAL),
        ("UNSPECIFIED", grpc.StatusCode.INTERNAL),
    ],
)
async def test_the_workers_failures_become_statuses_after_the_text_so_far(reason: str, code: grpc.StatusCode) -> None:
    async with bench(failover_moves=0) as b:
        call = b.client.Generate(generate())
        submit = await b.worker.submits.get()
        b.worker.finish(submit.request_id, encode("part"), reason)
        assert (await call.read()).text == "part"
        error = await failure(call)
        assert error.code() == code
        if code == grpc.StatusCode.INTERNAL:
            assert detail(error, error_details_pb2.RequestInfo).request_id == submit.trace_id


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("INVALID", grpc.StatusCode.INVALID_ARGUMENT),
        ("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE),
        ("UNSPECIFIED", grpc.StatusCode.INTERNAL),
    ],
)
async def test_the_workers_rejections_become_statuses(reason: str, code: grpc.StatusCode) -> None:
    async with bench(failover_moves=0) as b:
        call = b.client.Generate(generate())
        response = engine_pb2.ServeResponse()
        response.rejections.add(
            request_id=(await b.worker.submits.get()).request_id,
            reason=f"REJECTION_REASON_{reason}",
            field="prompt_token_ids",
            message="too much",
            retry_after_ms=1500,
        )
        b.worker.send(response)
        error = await failure(call)
        assert error.code() == code
        if reason == "INVALID":
            [violation] = detail(error, error_details_pb2.BadRequest).field_violations
            assert (violation.field, violation.description) == ("prompt", "too much")
        if reason == "OVERLOADED":
            assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1500


async def test_the_limits_of_a_key_hold_for_its_caller_alone(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("alice", "bob")}
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(
            f'[[key]]\nname = "{name}"\nhash = "{key_hash(key)}"\nmax_requests = 1\nmax_priority = 0\n'
            for name, key in keys.items()
        )
    )
    as_alice, as_bob = ((("authorization", f"Bearer {key}"),) for key in keys.values())
    async with bench(keys_file=file) as b:
        running = b.client.Generate(generate(), metadata=as_alice)
        submit = await b.worker.submits.get()
        error = await failure(b.client.Generate(generate(), metadata=as_alice))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "alice has 1 requests in flight, at most 1" in str(error.details())
        urgent = inference_pb2.GenerateRequest(prompt="x", priority=1)
        error = await failure(b.client.Generate(urgent, metadata=as_bob))
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "bob" in str(error.details())
        other = b.client.Generate(generate(), metadata=as_bob)
        b.worker.finish((await b.worker.submits.get()).request_id, encode("b"))
        assert (await other.read()).text == "b"
        b.worker.finish(submit.request_id, encode("a"))
        assert (await running.read()).text == "a"


async def test_too_many_requests_are_refused_with_a_delay_until_one_ends() -> None:
    async with bench(max_requests=2, retry_after_ms=250) as b:
        calls = [b.client.Generate(generate()) for _ in range(2)]
        running = [await b.worker.submits.get() for _ in calls]
        error = await failure(b.client.Generate(generate()))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 250
        for submit in running:
            b.worker.finish(submit.request_id)
        for call in calls:
            while await call.read() is not grpc.aio.EOF:
                pass
        await check_works(b)


async def test_prompt_tokens_in_flight_are_bounded_but_one_long_prompt_alone_is_taken() -> None:
    async with bench(max_prompt_tokens=10) as b:
        ids = inference_pb2.TokenIds(ids=[1] * (MAX_CONTEXT - 1))
        long = b.client.Generate(inference_pb2.GenerateRequest(prompt_ids=ids))
        await b.worker.submits.get()
        assert (await failure(b.client.Generate(generate()))).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        long.cancel()
        await b.worker.aborts.get()
        await check_works(b)


async def test_drain_refuses_new_requests_and_waits_for_running_ones() -> None:
    async with bench() as b:
        call = b.client.Generate(generate())
        request_id = (await b.worker.submits.get()).request_id
        drained = asyncio.create_task(b.router.drain(60))
        await b.wait_health(False)
        assert (await failure(b.client.Generate(generate()))).code() == grpc.StatusCode.UNAVAILABLE
        assert not drained.done()
        b.worker.finish(request_id, encode("done"))
        assert (await call.read()).text == "done"
        assert await call.read() is grpc.aio.EOF
        await drained


async def test_random_cancels_leave_nothing_behind() -> None:
    async with bench() as b:
        draw = random.Random(7)
        ended: set[int] = set()

        async def work() -> None:
            while True:
                request_id = (await b.worker.submits.get()).request_id
                b.worker.send(*(step(request_id, encode("abc")) for _ in range(draw.randrange(1, 4))))
                if draw.random() < 0.5:
                    b.worker.finish(request_id)
                    ended.add(request_id)

        async def ask(index: int) -> None:
            call = b.client.Generate(generate(stop=["bca"] if index % 2 else []))
            if index % 3:
                await call.read()
            else:
                for _ in range(draw.randrange(300)):
                    await asyncio.sleep(0)
            call.cancel()

        worker = asyncio.create_task(work())
        for _ in range(4):
            await asyncio.gather(*(ask(index) for index in range(50)))
        await asyncio.wait_for(b.router.drain(60), 30)
        check = b.client.Generate(generate())
        assert (await failure(check)).code() == grpc.StatusCode.UNAVAILABLE
        assert b.worker.submits.empty()
        while ended != b.worker.seen:
            ended.add(await b.worker.aborts.get())
        worker.cancel()
