"""EngineService over a socket: streams, credit, aborts, refusals, drain and failure."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from engine_worker.errors import DeviceError, EngineFailedError
from engine_worker.runtime.records import Sampling
from glmserve.engine.v1 import engine_pb2
from tests.unit.scripted_engine import undisturbed
from tests.unit.worker_harness import Worker, running_worker, submit, worker_limits


def expected(prompt: list[int], max_tokens: int, seed: int = 7) -> list[int]:
    return undisturbed(prompt, Sampling(seed=seed, prompt_len=len(prompt)), max_tokens)


class Gate:
    """Holds the engine before it runs a step, until opened."""

    def __init__(self, worker: Worker, step: int = 0) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self._step = step
        worker.engine.before_collect = self._wait

    def _wait(self, step: int) -> None:
        if step >= self._step:
            self.reached.set()
            assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


async def test_one_request() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        await stream.send(submit(5, [1, 2, 3], 8))
        ended = await stream.end_of(5)
        assert ended.token_ids == expected([1, 2, 3], 8)
        assert ended.finish is not None
        assert ended.finish.reason == engine_pb2.FINISH_REASON_LENGTH
        assert ended.finish.seed == 7
        usage = ended.finish.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (3, 8, 0)
        assert 0 <= usage.queue_us <= usage.first_token_us <= usage.total_us


async def test_a_crowd_gets_what_each_would_get_alone() -> None:
    async with running_worker(worker_limits(num_pages=16, max_context=128)) as worker, worker.stream() as stream:
        prompts = {number: [number % 5] * (1 + number) for number in range(30)}
        await stream.send(*(submit(number, prompt, 20) for number, prompt in prompts.items()))
        for number, prompt in prompts.items():
            assert (await stream.end_of(number)).token_ids == expected(prompt, 20)
        load = await worker.wait_for_load(lambda load: load.free_pages + load.cached_pages == 16)
        assert load.generated_tokens >= 600
        assert (load.running_requests, load.waiting_requests, load.waiting_prompt_tokens) == (0, 0, 0)


async def test_prefix_is_reused_up_to_the_last_token() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        prompt = [3] * 32
        for request_id, cached in ((1, 0), (2, 16)):
            await stream.send(submit(request_id, prompt, 4))
            ended = await stream.end_of(request_id)
            assert ended.token_ids == expected(prompt, 4)
            assert ended.finish is not None
            assert ended.finish.usage.cached_prompt_tokens == cached


async def test_stop_id_is_the_last_token_and_is_named() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        tokens = expected([1, 2, 3], 8)
        await stream.send(submit(1, [1, 2, 3], 8, stop_token_ids=[tokens[3]]))
        ended = await stream.end_of(1)
        assert ended.finish is not None
        assert ended.finish.reason == engine_pb2.FINISH_REASON_STOP
        assert ended.finish.stop_token_id == tokens[3]
        assert ended.token_ids == tokens[: tokens.index(tokens[3]) + 1]


async def test_resumed_request_goes_on_where_it_stopped() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        tokens = expected([1, 2, 3], 12)
        await stream.send(submit(1, [1, 2, 3], 12, generated=tokens[:5]))
        ended = await stream.end_of(1)
        assert ended.token_ids == tokens[5:]
        assert ended.finish is not None
        assert ended.finish.usage.completion_tokens == 12


async def test_logprobs_belong_to_their_tokens() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        await stream.send(submit(1, max_tokens=4, logprobs=2), submit(2, [4], 4, logprobs=0), submit(3, [5], 4))
        for request_id, alternatives in ((1, 2), (2, 0)):
            ended = await stream.end_of(request_id)
            assert [-item.logprob for item in ended.logprobs] == ended.token_ids
            assert all(len(item.top_token_ids) == len(item.top_logprobs) == alternatives for item in ended.logprobs)
        assert (await stream.end_of(3)).logprobs == []


async def test_unset_seed_is_drawn_and_reported() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        await stream.send(submit(1, [1], 4, seed=None), submit(2, [1], 4, seed=None))
        first, second = [(await stream.end_of(request_id)) for request_id in (1, 2)]
        assert first.finish is not None
        assert second.finish is not None
        assert first.finish.seed != second.finish.seed
        assert first.token_ids == expected([1], 4, seed=first.finish.seed)


async def test_without_credit_tokens_are_merged_and_the_finish_waits() -> None:
    async with running_worker() as worker, worker.stream(credit=0) as stream:
        await stream.send(submit(1, [1], 20), submit(2, [2], 20))
        await worker.wait_for_load(lambda load: load.generated_tokens == 40)
        await stream.send(submit(3, [], 1))
        response = await stream.read()
        assert [rejection.request_id for rejection in response.rejections] == [3], "a rejection needs no credit"
        assert not response.outputs
        assert not response.finishes
        await stream.send(credit=1)
        response = await stream.read()
        assert {output.request_id: len(output.token_ids) for output in response.outputs} == {1: 20, 2: 20}
        assert {finish.request_id for finish in response.finishes} == {1, 2}


async def test_abort_ends_a_request_once_and_may_come_late_or_twice() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        gate = Gate(worker, step=3)
        await stream.send(submit(1, [1], 200), submit(2, [2], 10))
        await asyncio.to_thread(gate.reached.wait)
        await stream.send(aborts=[1, 1, 99])
        # The abort is in the engine's queue once the service has answered this.
        await stream.send(submit(3, []))
        await stream.end_of(3)
        gate.open()
        ended = await stream.end_of(1)
        assert ended.finish is not None
        assert ended.finish.reason == engine_pb2.FINISH_REASON_ABORTED
        assert ended.token_ids == expected([1], 200)[: len(ended.token_ids)]
        await stream.send(aborts=[1])
        assert (await stream.end_of(2)).token_ids == expected([2], 10), "its neighbour is not disturbed"
        await stream.send(submit(1, [9], 2))
        stream.ends.clear()
        assert (await stream.end_of(1)).token_ids == expected([9], 2), "the id may be used again"


async def test_submit_and_abort_in_one_message() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        await stream.send(submit(1, [1], 200), aborts=[1])
        ended = await stream.end_of(1)
        assert ended.finish is not None
        assert ended.finish.reason == engine_pb2.FINISH_REASON_ABORTED


async def test_timeout_in_the_queue() -> None:
    limits = worker_limits(max_running=1)
    async with running_worker(limits) as worker, worker.stream() as stream:
        await stream.send(submit(1, [1], 250), submit(2, [2], 5, timeout_ms=1))
        gate = Gate(worker, step=5)
        await asyncio.to_thread(gate.reached.wait)
        gate.open()
        ended = await stream.end_of(2)
        assert ended.finish is not None
        assert ended.finish.reason == engine_pb2.FINISH_REASON_TIMEOUT
        assert ended.token_ids == []
        assert ended.finish.usage.queue_us == ended.finish.usage.total_us


@pytest.mark.parametrize("ending", ["cancel", "half-close"])
async def test_end_of_the_stream_aborts_its_requests(ending: str) -> None:
    async with running_worker() as worker:
        gate = Gate(worker, step=2)
        async with worker.stream() as stream:
            await stream.send(*(submit(number, [number], 200) for number in range(6)))
            await asyncio.to_thread(gate.reached.wait)
            if ending == "half-close":
                await stream.call.done_writing()
                while await stream.call.read() is not grpc.aio.EOF:
                    pass
                assert await stream.call.code() == grpc.StatusCode.OK
        await worker.wait_for_load(lambda load: load.waiting_requests + load.running_requests > 0)
        gate.open()
        load = await worker.wait_for_load(lambda load: load.free_pages + load.cached_pages == load.total_pages)
        assert load.generated_tokens < 6 * 200
        async with worker.stream() as stream:
            await stream.send(submit(1, [1], 5))
            assert (await stream.end_of(1)).token_ids == expected([1], 5)


async def test_id_in_use_is_refused() -> None:
    async with running_worker() as worker, worker.stream(credit=0) as stream:
        await stream.send(submit(1, [1], 5), submit(1, [1], 5))
        rejection = (await stream.end_of(1)).rejection
        assert rejection is not None
        assert (rejection.reason, rejection.field) == (engine_pb2.REJECTION_REASON_INVALID, "request_id")
        stream.ends.clear()
        await stream.send(credit=10)
        assert (await stream.end_of(1)).token_ids == expected([1], 5), "the first one goes on"


async def test_full_queue_is_refused_with_a_delay() -> None:
    limits = worker_limits(max_running=1)
    async with running_worker(limits, max_waiting=2, max_waiting_tokens=100) as worker, worker.stream() as stream:
        gate = Gate(worker)
        await stream.send(submit(1, [1], 5))
        await asyncio.to_thread(gate.reached.wait)
        await worker.wait_for_load(lambda load: load.running_requests == 1)
        await stream.send(submit(2, [1] * 60), submit(3, [1] * 60), submit(4, [1]), submit(5, [1]))
        for request_id, text in ((3, "60 prompt tokens wait"), (5, "2 requests wait, at most 2 may")):
            rejection = (await stream.end_of(request_id)).rejection
            assert rejection is not None
            assert rejection.reason == engine_pb2.REJECTION_REASON_OVERLOADED
            assert rejection.retry_after_ms >= 100
            assert text in rejection.message
        gate.open()
        for request_id in (1, 2, 4):
            assert (await stream.end_of(request_id)).finish is not None


async def test_requests_that_a_stream_does_not_read_are_bounded() -> None:
    async with running_worker(per_stream=2) as worker, worker.stream(credit=0) as stream:
        await stream.send(submit(1, [1], 5), submit(2, [1], 5))
        await worker.wait_for_load(lambda load: load.generated_tokens == 10)
        await stream.send(submit(3, [1], 5))
        rejection = (await stream.end_of(3)).rejection
        assert rejection is not None
        assert rejection.reason == engine_pb2.REJECTION_REASON_OVERLOADED
        assert "its maximum" in rejection.message


async def test_drain_refuses_and_finishes_what_runs() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        gate = Gate(worker, step=2)
        await stream.send(submit(1, [1], 30))
        await asyncio.to_thread(gate.reached.wait)
        draining = asyncio.create_task(worker.service.drain(60))
        await worker.wait_for_load(lambda load: load.draining)
        await stream.send(submit(2, [1], 5))
        rejection = (await stream.end_of(2)).rejection
        assert rejection is not None
        assert rejection.reason == engine_pb2.REJECTION_REASON_UNAVAILABLE
        assert not draining.done()
        gate.open()
        await draining
        assert (await stream.end_of(1)).token_ids == expected([1], 30)


async def test_drain_limit_ends_the_rest_unavailable() -> None:
    async with running_worker() as worker, worker.stream() as stream:
        gate = Gate(worker, step=2)
        await stream.send(submit(1, [1], 200))
        await asyncio.to_thread(gate.reached.wait)
        await worker.service.drain(0)
        stopping = asyncio.create_task(asyncio.to_thread(worker.loop.stop))
        gate.open()
        await stopping
        finish = (await stream.end_of(1)).finish
        assert finish is not None
        assert finish.reason == engine_pb2.FINISH_REASON_UNAVAILABLE


async def test_engine_failure_ends_every_request_and_refuses_new_ones() -> None:
    async with running_worker() as worker, worker.stream() as stream, worker.stream() as other:
        accepted = threading.Event()

        def fail(step: int) -> None:
            assert accepted.wait(30)
            if step == 5:
                raise DeviceError("layers.3.moe.route: device lost")

        worker.engine.before_collect = fail
        await stream.send(submit(1, [1], 200), submit(2, [1], 200))
        await other.send(submit(1, [1], 200))
        await worker.wait_for_load(lambda load: load.running_requests + load.waiting_requests == 3)
        accepted.set()
        for of, request_id in ((stream, 1), (stream, 2), (other, 1)):
            finish = (await of.end_of(request_id)).finish
            assert finish is not None
            assert finish.reason == engine_pb2.FINISH_REASON_UNAVAILABLE
        with pytest.raises(EngineFailedError, match=r"layers\.3\.moe\.route: device lost"):
            await worker.service.wait_for_failure()
        await stream.send(submit(3, [1], 5))
        rejection = (await stream.end_of(3)).rejection
        assert rejection is not None
        assert rejection.reason == engine_pb2.REJECTION_REASON_UNAVAILABLE


async def test_generate_runs_the_whole_way() -> None:
    async with running_worker() as worker:
        finish = await worker.service.generate(submit(1, [0] * 8, 4))
        assert finish.reason == engine_pb2.FINISH_REASON_LENGTH
        with pytest.raises(EngineFailedError, match="prompt_token_ids is empty"):
            await worker.service.generate(submit(1, [], 4))
