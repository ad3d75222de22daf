"""What one stream is sent, and when."""

from __future__ import annotations

import asyncio

import pytest

from engine_worker.session import SubscriberSession
from glmserve.engine.v1 import engine_pb2


def session(*request_ids: int, credit: int = 0) -> SubscriberSession:
    made = SubscriberSession(1, 10)
    for request_id in request_ids:
        made.open(request_id, "trace")
    if credit:
        made.grant(credit)
    return made


def finish(request_id: int) -> engine_pb2.Finish:
    return engine_pb2.Finish(request_id=request_id)


async def take(of: SubscriberSession) -> engine_pb2.ServeResponse:
    response = await of.next_response()
    assert response is not None
    return response


async def test_a_step_is_one_response() -> None:
    of = session(1, 2, credit=1)
    of.add_token(1, 11, None)
    of.add_token(2, 21, None)
    response = await take(of)
    assert {output.request_id: list(output.token_ids) for output in response.outputs} == {1: [11], 2: [21]}


async def test_tokens_are_merged_until_there_is_credit() -> None:
    of = session(1)
    waiting = asyncio.create_task(of.next_response())
    for token in range(5):
        of.add_token(1, token, engine_pb2.TokenLogprobs(logprob=-float(token)))
    await asyncio.sleep(0)
    assert not waiting.done()
    of.grant(1)
    response = await waiting
    assert response is not None
    (output,) = response.outputs
    assert list(output.token_ids) == [0, 1, 2, 3, 4]
    assert [item.logprob for item in output.logprobs] == [0, -1, -2, -3, -4]


async def test_each_response_with_outputs_takes_one_credit() -> None:
    of = session(1, credit=2)
    for token in (1, 2):
        of.add_token(1, token, None)
        assert (await take(of)).outputs[0].token_ids == [token]
    of.add_token(1, 3, None)
    waiting = asyncio.create_task(of.next_response())
    await asyncio.sleep(0)
    assert not waiting.done()
    of.grant(1)
    response = await waiting
    assert response is not None
    assert response.outputs[0].token_ids == [3]


async def test_a_finish_follows_the_last_token() -> None:
    of = session(1, 2)
    of.add_token(1, 5, None)
    of.add_finish(finish(1))
    of.add_finish(finish(2))
    assert [item.request_id for item in (await take(of)).finishes] == [2], "nothing of 2 waits for credit"
    of.grant(1)
    response = await take(of)
    assert response.outputs[0].token_ids == [5]
    assert [item.request_id for item in response.finishes] == [1]


async def test_a_backlog_is_sent_in_bounded_pieces_and_in_order() -> None:
    of = session(1, 2)
    for token in range(10_000):
        of.add_token(1, token, None)
        of.add_token(2, token, None)
    of.add_finish(finish(1))
    of.grant(100)
    got: dict[int, list[int]] = {1: [], 2: []}
    finished = False
    while sum(map(len, got.values())) < 20_000:
        response = await take(of)
        assert sum(len(output.token_ids) for output in response.outputs) <= 8192
        for output in response.outputs:
            assert not (finished and output.request_id == 1)
            got[output.request_id] += output.token_ids
        finished = finished or bool(response.finishes)
    assert got == {1: list(range(10_000)), 2: list(range(10_000))}
    assert finished


async def test_log_probabilities_of_prompts_count_for_the_size_of_a_response() -> None:
    session = SubscriberSession(1, 100)
    for request_id in (1, 2, 3):
        session.open(request_id, "")
        session.add_prompt_logprobs(request_id, [engine_pb2.TokenLogprobs()] * 5000)
        session.add_token(request_id, 7, None)
    session.grant(10)
    sent: list[tuple[int, int]] = []
    while len(sent) < 3:
        response = await session.next_response()
        assert response is not None
        assert sum(len(output.prompt_logprobs) for output in response.outputs) <= 2 * 5000
        sent += [(output.request_id, len(output.prompt_logprobs)) for output in response.outputs]
    assert sent == [(1, 5000), (2, 5000), (3, 5000)]


async def test_what_comes_for_a_request_that_is_not_open_is_dropped() -> None:
    of = session(1, credit=1)
    of.add_token(9, 5, None)
    assert of.add_finish(finish(9)) is None
    of.add_token(1, 6, None)
    response = await take(of)
    assert [output.request_id for output in response.outputs] == [1]
    assert not response.finishes


async def test_an_id_is_known_and_counts_until_its_finish_is_sent() -> None:
    of = SubscriberSession(1, 1)
    of.open(1, "")
    of.add_token(1, 5, None)
    assert of.add_finish(finish(1)) == ""
    assert of.is_known(1)
    assert of.is_full
    of.grant(1)
    await take(of)
    assert not of.is_known(1)
    assert not of.is_full


async def test_a_client_that_does_not_read_its_rejections_is_not_read_either() -> None:
    of = session()
    for request_id in range(256):
        of.add_rejection(engine_pb2.Rejection(request_id=request_id))
    room = asyncio.create_task(of.wait_for_room())
    await asyncio.sleep(0)
    assert not room.done()
    assert len((await take(of)).rejections) == 256
    await room


@pytest.mark.parametrize("pending", [False, True])
async def test_finish_sends_what_is_pending_first(pending: bool) -> None:
    of = session(1, credit=1)
    if pending:
        of.add_token(1, 5, None)
    of.add_finish(finish(1))
    of.finish()
    assert len((await take(of)).finishes) == 1
    assert await of.next_response() is None


async def test_close_ends_at_once() -> None:
    of = session(1)
    waiting = asyncio.create_task(of.next_response())
    await asyncio.sleep(0)
    of.add_token(1, 5, None)
    of.close()
    assert await waiting is None
    await of.wait_for_room()


async def test_only_the_first_abort_of_an_open_request_counts() -> None:
    of = session(1)
    assert [of.abort(request_id) for request_id in (1, 1, 2)] == [True, False, False]
    of.add_finish(finish(1))
    assert not of.abort(1)
    await take(of)
    of.open(1, "trace")
    assert of.abort(1), "the id is in use anew"
