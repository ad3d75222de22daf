"""A worker without a model: every step brings one token to every open request, at once or at a fixed pace.

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
    """Emits as fast as credit allows; `pace_s`: the time of a step, 0 for none."""

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
        due = asyncio.get_running_loop().time()
        while True:
            await stream.ready.wait()
            if self._pace_s:
                due = max(due + self._pace_s, asyncio.get_running_loop().time())
                await asyncio.sleep(due - asyncio.get_running_loop().time())
            yield stream.step()


class _Stream:
    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self._credit = 0
        self._steps = 0
        self._left: dict[int, int] = {}

    async def read(self, requests: AsyncIterator[engine_pb2.ServeRequest]) -> None:
        async for request in requests:
            self._credit += request.credit
            for submit in request.submits:
                self._left[submit.request_id] = submit.sampling.max_tokens
            for request_id in request.abort_request_ids:
                self._left.pop(request_id, None)
            self._settle()

    def step(self) -> engine_pb2.ServeResponse:
        response = engine_pb2.ServeResponse()
        self._credit -= 1
        self._steps += 1
        token = [_FIRST_ID + self._steps % 64]
        for request_id in self._left:
            response.outputs.add(request_id=request_id, token_ids=token)
        for request_id, left in list(self._left.items()):
            self._left[request_id] = left - 1
            if left == 1:
                del self._left[request_id]
                response.finishes.add(request_id=request_id, reason=engine_pb2.FINISH_REASON_LENGTH)
        self._settle()
        return response

    def _settle(self) -> None:
        if self._credit and self._left:
            self.ready.set()
        else:
            self.ready.clear()


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
