"""Whatever a router submits, it is accepted and ended once or rejected once, and the worker goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from glmserve.engine.v1 import engine_pb2
from tests.fuzzing import fuzz, messages
from tests.unit.worker_harness import Ended, Worker, running_worker, submit


@dataclass
class Loop:
    """A worker that is asked from outside its event loop, a stream at a time."""

    runner: asyncio.Runner
    worker: Worker

    def run(self, submits: list[engine_pb2.Submit]) -> list[Ended]:
        return self.runner.run(self._run(submits))

    async def _run(self, submits: list[engine_pb2.Submit]) -> list[Ended]:
        async with self.worker.stream() as stream:
            await stream.send(*submits)
            await stream.send(aborts=[given.request_id for given in submits])
            return [await stream.end_of(given.request_id) for given in submits]


@pytest.fixture(scope="module")
def worker() -> Iterator[Loop]:
    with asyncio.Runner() as runner:
        context = running_worker()
        yield Loop(runner, runner.run(context.__aenter__()))
        runner.run(context.__aexit__(None, None, None))


@fuzz(200)
@given(st.lists(messages(engine_pb2.Submit.DESCRIPTOR), min_size=1, max_size=4))
def test_any_submits(worker: Loop, drawn: list[Message]) -> None:
    submits = []
    for request_id, given_ in enumerate(drawn, start=1):
        assert isinstance(given_, engine_pb2.Submit)
        given_.request_id = request_id
        submits.append(given_)
    for ended in worker.run(submits):
        assert (ended.finish is None) != (ended.rejection is None)
        if ended.rejection is not None:
            assert ended.rejection.message
            assert len(ended.rejection.message) < 1000
    (good,) = worker.run([submit(1, [1, 2], 1)])
    assert good.rejection is None
