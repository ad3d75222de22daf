"""A client that keeps its connection and reads nothing keeps its place only so long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from glmserve.inference.v1 import inference_pb2
from tests.chaos.http2 import (
    DATA,
    END_STREAM,
    PREFACE,
    SETTINGS_ACK,
    frame,
    message,
    raw,
    request_headers,
    settings,
)
from tests.unit.router_harness import bench, encode


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


async def test_a_client_that_never_reads_loses_its_place(logs: list[Any]) -> None:
    async with bench(stall_s=0.05, max_requests=1) as b:
        body = inference_pb2.GenerateRequest(prompt="x").SerializeToString()
        async with raw(b.router.address, PREFACE, settings(window=0), SETTINGS_ACK) as connection:
            connection.send(request_headers(1), frame(DATA, END_STREAM, 1, message(body)))
            submit = await b.worker.submits.get()
            b.worker.finish(submit.request_id, encode("Paris"))
            await b.router.drain(60)
        assert [line["limit_s"] for line in logs if line["event"] == "client_stalled"] == [0.05]
        assert [line["status"] for line in logs if line["event"] == "request"] == ["CANCELLED"]


async def test_tokens_within_the_interval_are_merged_and_the_first_is_not_held_back() -> None:
    async with bench(stream_interval_ms=1000.0) as b:
        call = b.client.Generate(inference_pb2.GenerateRequest(prompt="The capital"))
        submit = await b.worker.submits.get()
        b.worker.tokens(submit.request_id, [300])
        first = await call.read()
        assert list(first.token_ids) == [300]
        for token_id in (301, 302):
            b.worker.tokens(submit.request_id, [token_id])
        b.worker.finish(submit.request_id, [303])
        last = await call.read()
        assert list(last.token_ids) == [301, 302, 303]
        assert last.HasField("finish")
        assert await call.read() is grpc.aio.EOF
