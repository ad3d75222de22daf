"""A worker without a model: every step brings one token to every open request.

At a fixed pace steps do not wait for a router: without credit their tokens are merged, as the protocol wants it.
Without a pace there is a step whenever there is credit.

`python -m tests.bench.fast_worker PACE_MS VOCAB_SIZE READY_FILE`
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from glmserve.service.grpc_server import start_server, wait_for_stop, write_ready_file

SERVICE = "glmserve.engine.v1.EngineService"
# Ids of byte-level tokenisers whose text is one printable character.
_FIRST_ID = 300


class FastWorker(engine_pb2_grpc.EngineServiceServicer):
    """`pace_s`: the time of a step; 0: none, steps wait for credit only."""

    def __init__(self, pace_s: float, vocab_size: int) -> None:
        self._pace_s = pace_s
        self._info = engine_pb2.GetInfoResponse(
            model_name="fast", vocab_size=vocab_size, max_context=1 << 20, max_running_requests=4096
        )

    async def GetInfo(self, request: engine_pb2.GetInfoRequest, context: Any) -> engine_pb2.GetInfoResponse:
        return self._info

    async def GetLoad(self, request: engine_pb2.GetLoadRequest, context: Any) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=engine_pb2.Load())

    async def Serve(
        self, requests: AsyncIterator[engine_pb2.ServeRequest], context: Any
    ) -> AsyncIterator[engine_pb2.ServeResponse]:
        stream = _Stream()
        reader = asyncio.create_task(stream.read(requests))
        context.add_done_callback(lambda _: reader.cancel())
        yield engine_pb2.ServeResponse(load=engine_pb2.Load(total_pages=1, free_pages=1))
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            await stream.has_work.wait()
            if self._pace_s:
                # Steps that were missed are made up for, so that the pace is what it says.
                due = clock() if due + 1.0 < clock() else due + self._pace_s
                await asyncio.sleep(due - clock())
            else:
                await stream.has_credit.wait()
            stream.step()
            if stream.has_credit.is_set():
                yield stream.take()


class _Stream:
    """`has_work`: a request has tokens to come, or some that were not sent."""

    def __init__(self) -> None:
        self.has_work = asyncio.Event()
        self.has_credit = asyncio.Event()
        self._credit = 0
        self._steps = 0
        self._left: dict[int, int] = {}
        self._unsent: dict[int, list[int]] = {}

    async def read(self, requests: AsyncIterator[engine_pb2.ServeRequest]) -> None:
        async for request in requests:
            self._credit += request.credit
            for submit in request.submits:
                self._left[submit.request_id] = submit.sampling.max_tokens
                self._unsent[submit.request_id] = []
            for request_id in request.abort_request_ids:
                self._left.pop(request_id, None)
                self._unsent.pop(request_id, None)
            self._settle()

    def step(self) -> None:
        self._steps += 1
        token = _FIRST_ID + self._steps % 64
        for request_id, left in self._left.items():
            if left:
                self._unsent[request_id].append(token)
                self._left[request_id] = left - 1

    def take(self) -> engine_pb2.ServeResponse:
        """All that was not sent yet, for one credit."""
        response = engine_pb2.ServeResponse()
        self._credit -= 1
        for request_id, ids in self._unsent.items():
            response.outputs.add(request_id=request_id, token_ids=ids)
            ids.clear()
        for request_id in [request_id for request_id, left in self._left.items() if not left]:
            del self._left[request_id], self._unsent[request_id]
            response.finishes.add(request_id=request_id, reason=engine_pb2.FINISH_REASON_LENGTH)
        self._settle()
        return response

    def _settle(self) -> None:
        for event, holds in ((self.has_work, self._left), (self.has_credit, self._credit)):
            if holds:
                event.set()
            else:
                event.clear()


async def main(pace_ms: float, vocab_size: int, ready_file: Path) -> None:
    """Serve until SIGTERM."""
    worker = FastWorker(pace_ms / 1000, vocab_size)
    started = await start_server(
        lambda server: engine_pb2_grpc.add_EngineServiceServicer_to_server(worker, server),
        (SERVICE,),
        "127.0.0.1:0",
        64 << 20,
    )
    await started.set_serving(True)
    write_ready_file(ready_file, started.address)
    with contextlib.suppress(asyncio.CancelledError):
        await wait_for_stop()
    await started.server.stop(0)


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
