"""The parts of the worker link that need no socket: per-request streams and what goes into a message."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from glmserve.engine.v1 import engine_pb2
from glmserve.service.status import DeadlineError, UnavailableError
from glmserve.service.tls import Channels
from router.dispatch.serve_session import CREDIT_WINDOW, ServeSession
from router.dispatch.token_stream import TokenStream
from router.dispatch.worker_link import WorkerLink


def output(*ids: int, logprobs: bool = False) -> engine_pb2.SequenceOutput:
    made = engine_pb2.SequenceOutput(request_id=1, token_ids=ids)
    if logprobs:
        made.logprobs.extend(engine_pb2.TokenLogprobs(logprob=-float(token_id)) for token_id in ids)
    return made


def submit(size: int = 1) -> engine_pb2.Submit:
    return engine_pb2.Submit(prompt_token_ids=range(size))


async def make_session() -> ServeSession:
    # Nothing is sent before `run`, so no server is needed.
    return ServeSession(grpc.aio.insecure_channel("127.0.0.1:1"), 1.0, 0, lambda: None)


class TestTokenStream:
    async def test_unread_outputs_merge_into_one_chunk(self) -> None:
        stream = TokenStream(1)
        for token_id in range(5):
            stream.push(output(token_id, logprobs=True))
        stream.finish(engine_pb2.Finish(request_id=1))
        chunk = await stream.read()
        assert chunk.token_ids == [0, 1, 2, 3, 4]
        assert [entry.logprob for entry in chunk.logprobs] == [0.0, -1.0, -2.0, -3.0, -4.0]
        assert chunk.finish is not None

    async def test_a_waiting_reader_is_woken(self) -> None:
        stream = TokenStream(1)
        reader = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        assert not reader.done()
        stream.push(output(7))
        assert (await reader).token_ids == [7]

    async def test_an_error_comes_after_the_ids_before_it_and_the_first_end_counts(self) -> None:
        stream = TokenStream(1)
        stream.push(output(1))
        stream.fail(DeadlineError("late"))
        stream.fail(UnavailableError("lost"))
        stream.finish(engine_pb2.Finish())
        assert (await stream.read()).token_ids == [1]
        with pytest.raises(DeadlineError):
            await stream.read()

    async def test_a_reader_that_was_cancelled_does_not_break_the_link(self) -> None:
        stream = TokenStream(1)
        reader = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        reader.cancel()
        stream.push(output(1))
        stream.fail(UnavailableError("lost"))
        with pytest.raises(asyncio.CancelledError):
            await reader


class TestServeSession:
    async def test_one_message_takes_all_that_waits(self) -> None:
        session = await make_session()
        streams = [session.submit(submit()) for _ in range(3)]
        message = session._take_outgoing()
        assert [entry.request_id for entry in message.submits] == [stream.request_id for stream in streams]
        assert len({stream.request_id for stream in streams}) == 3
        assert message.credit == CREDIT_WINDOW
        session.abort(streams[0])
        session.release(streams[2])
        message = session._take_outgoing()
        assert list(message.abort_request_ids) == [streams[0].request_id, streams[2].request_id]
        assert message.credit == 0
        assert not message.submits

    async def test_long_prompts_are_spread_over_messages(self) -> None:
        session = await make_session()
        for _ in range(5):
            session.submit(submit(200_000))
        sizes = []
        while session._outgoing.is_set():
            message = session._take_outgoing()
            assert message.ByteSize() < 4 << 20
            sizes.append(len(message.submits))
        assert sizes == [2, 2, 1]

    async def test_a_request_that_was_not_sent_yet_is_simply_not_sent(self) -> None:
        session = await make_session()
        stream = session.submit(submit())
        session.release(stream)
        session.release(stream)
        message = session._take_outgoing()
        assert not message.submits
        assert not message.abort_request_ids

    async def test_a_finished_request_is_not_aborted(self) -> None:
        session = await make_session()
        stream = session.submit(submit())
        session._take_outgoing()
        session._dispatch(engine_pb2.ServeResponse(finishes=[engine_pb2.Finish(request_id=stream.request_id)]))
        session.abort(stream)
        session.release(stream)
        assert not session._take_outgoing().abort_request_ids

    async def test_a_request_that_failed_here_is_still_aborted_there(self) -> None:
        session = await make_session()
        stream = session.submit(submit())
        session._take_outgoing()
        stream.fail(DeadlineError("late"))
        session.release(stream)
        assert list(session._take_outgoing().abort_request_ids) == [stream.request_id]

    async def test_words_of_unknown_requests_are_ignored(self) -> None:
        session = await make_session()
        response = engine_pb2.ServeResponse()
        response.outputs.add(request_id=99, token_ids=[1])
        response.finishes.add(request_id=99)
        response.rejections.add(request_id=99)
        session._dispatch(response)


class TestWorkerLink:
    async def test_refuses_at_once_while_no_worker_is_there(self) -> None:
        link = WorkerLink("127.0.0.1:1", Channels(None), vocab_size=10, heartbeat_s=1.0, on_change=lambda: None)
        assert not link.serving
        with pytest.raises(UnavailableError, match="no engine worker at 127.0.0.1:1: not connected yet"):
            link.submit(submit())
        with pytest.raises(UnavailableError):
            _ = link.info

    async def test_says_why_the_worker_cannot_be_reached(self) -> None:
        link = WorkerLink("127.0.0.1:1", Channels(None), vocab_size=10, heartbeat_s=1.0, on_change=lambda: None)
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            assert not await link._connect_and_serve(channel)
        with pytest.raises(UnavailableError, match="UNAVAILABLE: .*refused"):
            link.submit(submit())

    async def test_counts_what_began_since_the_load_among_the_running(self) -> None:
        link = WorkerLink("127.0.0.1:1", Channels(None), vocab_size=10, heartbeat_s=1.0, on_change=lambda: None)
        link._info = engine_pb2.GetInfoResponse(max_running_requests=2)
        session = link.session = await make_session()
        session.load = engine_pb2.Load(decode_tokens_per_s=10, tokens_per_request=5)
        assert (link.open_requests, link.running_requests, link.queue_s) == (0, 0, 0.0)
        streams = [session.submit(submit()) for _ in range(3)]
        assert (link.open_requests, link.running_requests, link.queue_s) == (3, 2, 1.0)
        session._take_load(engine_pb2.Load())
        assert link.running_requests == 2, "the worker said it before it had them"
        for stream in streams:
            session._dispatch(engine_pb2.ServeResponse(finishes=[engine_pb2.Finish(request_id=stream.request_id)]))
        assert link.running_requests == 0
