"""One Serve stream to a worker, from its first byte to its loss.

Ownership: the session holds every request submitted on it. When the stream ends, all of them fail WorkerLostError.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from router.dispatch.outcomes import rejection_error
from router.dispatch.token_stream import TokenStream
from router.errors import WorkerLostError

ENGINE_SERVICE = "glmserve.engine.v1.EngineService"
# Responses the worker may be ahead of us. Enough to cover a round trip at any step rate; beyond it the worker merges.
CREDIT_WINDOW = 32
# Prompt ids in one message: at most 5 bytes each, well below gRPC's default limit of 4 MiB.
_MAX_MESSAGE_IDS = 400_000

ServeCall: TypeAlias = "grpc.aio.StreamStreamCall[engine_pb2.ServeRequest, engine_pb2.ServeResponse]"


class LinkLostError(Exception):
    """The stream to the worker is gone. The text says how."""


class ServeSession:
    """Submits, aborts and credit one way; outputs, finishes, rejections and load the other."""

    def __init__(
        self, channel: grpc.aio.Channel, heartbeat_s: float, step_timeout_ms: int, on_change: Callable[[], None]
    ) -> None:
        """`step_timeout_ms`: when a step is stuck; 0: never. `on_change`: called when `serving` may have changed."""
        self._engine = engine_pb2_grpc.EngineServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._heartbeat_s = heartbeat_s
        self._step_timeout_ms = step_timeout_ms
        self._on_change = on_change
        self._ids = itertools.count(1)
        self._open: dict[int, TokenStream] = {}
        self._submits: dict[int, engine_pb2.Submit] = {}
        self._aborts: list[int] = []
        self._credit = CREDIT_WINDOW
        self._spent_credit = 0
        self._outgoing = asyncio.Event()
        self._outgoing.set()
        self._clock = asyncio.get_running_loop().time
        self._heard_at = self._clock()
        self._healthy = False
        self.load: engine_pb2.Load | None = None
        # Lost while it said that it served.
        self.failed = False
        # Prompt tokens of the requests that are open and were submitted after that load.
        self._new: dict[int, int] = {}

    @property
    def serving(self) -> bool:
        """The stream is up and the worker takes requests."""
        return self._healthy and self.load is not None and not self.load.draining

    @property
    def open_requests(self) -> int:
        """Submitted and not ended."""
        return len(self._open)

    @property
    def new_requests(self) -> int:
        """Open requests that the load does not know of."""
        return len(self._new)

    @property
    def new_prompt_tokens(self) -> int:
        """Their prompt tokens."""
        return sum(self._new.values())

    async def run(self) -> None:
        """Work until the stream is lost. Raises an ExceptionGroup of AioRpcError and LinkLostError; never returns."""
        call = self._engine.Serve()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(call))
                tasks.create_task(self._write(call))
                tasks.create_task(self._watch_health())
                tasks.create_task(self._beat())
        finally:
            call.cancel()
            self.failed = self.serving
            self.load = None
            self._on_change()
            for stream in self._open.values():
                stream.fail(WorkerLostError("the connection to the engine worker was lost; try again"))
            self._open.clear()

    def submit(self, submit: engine_pb2.Submit) -> TokenStream:
        """Queue `submit` for the next message; its request_id is set here."""
        request_id = next(self._ids)
        submit.request_id = request_id
        stream = self._open[request_id] = TokenStream(request_id)
        self._submits[request_id] = submit
        self._new[request_id] = len(submit.prompt_token_ids)
        self._outgoing.set()
        return stream

    def abort(self, stream: TokenStream) -> None:
        """Tell the worker to stop; the stream still gets its finish. Has no effect on one the worker has ended."""
        if stream.request_id in self._open:
            self._send_abort(stream.request_id)

    def release(self, stream: TokenStream) -> None:
        """Nobody reads the stream any more: abort it if the worker has it, and forget it. Idempotent."""
        self._new.pop(stream.request_id, None)
        running = self._open.pop(stream.request_id, None) is not None
        unsent = self._submits.pop(stream.request_id, None) is not None
        if running and not unsent:
            self._send_abort(stream.request_id)

    def _send_abort(self, request_id: int) -> None:
        self._aborts.append(request_id)
        self._outgoing.set()

    async def _read(self, call: ServeCall) -> None:
        async for response in call:
            self._heard_at = self._clock()
            if response.HasField("load"):
                self._take_load(response.load)
            self._dispatch(response)
            if response.outputs:
                self._spend_credit()
        raise LinkLostError("the worker ended the stream")

    def _take_load(self, load: engine_pb2.Load) -> None:
        if 0 < self._step_timeout_ms < load.step_age_ms:
            raise LinkLostError(f"its engine is stuck: a step has not ended for {load.step_age_ms} ms")
        self.load = load
        self._new.clear()
        self._on_change()

    def _dispatch(self, response: engine_pb2.ServeResponse) -> None:
        streams = self._open
        for output in response.outputs:
            stream = streams.get(output.request_id)
            if stream is not None:
                stream.push(output)
        for finish in response.finishes:
            self._new.pop(finish.request_id, None)
            stream = streams.pop(finish.request_id, None)
            if stream is not None:
                stream.finish(finish)
        for rejection in response.rejections:
            self._new.pop(rejection.request_id, None)
            stream = streams.pop(rejection.request_id, None)
            if stream is not None:
                stream.fail(rejection_error(rejection))

    def _spend_credit(self) -> None:
        self._spent_credit += 1
        if self._spent_credit >= CREDIT_WINDOW // 2:
            self._credit += self._spent_credit
            self._spent_credit = 0
            self._outgoing.set()

    async def _write(self, call: ServeCall) -> None:
        while True:
            await self._outgoing.wait()
            try:
                await call.write(self._take_outgoing())
            except asyncio.InvalidStateError:  # how grpc.aio says that the call is over
                raise LinkLostError("the worker ended the stream") from None

    def _take_outgoing(self) -> engine_pb2.ServeRequest:
        """The next message. Aborts name only requests of earlier messages."""
        request = engine_pb2.ServeRequest(abort_request_ids=self._aborts, credit=self._credit)
        self._aborts = []
        self._credit = 0
        room = _MAX_MESSAGE_IDS
        for request_id, submit in list(self._submits.items()):
            room -= len(submit.prompt_token_ids) + len(submit.generated_token_ids)
            if room < 0 and request.submits:
                return request
            request.submits.append(submit)
            del self._submits[request_id]
        self._outgoing.clear()
        return request

    async def _watch_health(self) -> None:
        request = health_pb2.HealthCheckRequest(service=ENGINE_SERVICE)
        async for response in self._health.Watch(request):  # type: ignore[attr-defined]
            self._healthy = response.status == health_pb2.HealthCheckResponse.SERVING
            self._on_change()
        raise LinkLostError("the worker ended the health watch")

    async def _beat(self) -> None:
        """After a silent interval ask for the load: a worker that cannot answer within another one is gone."""
        while True:
            silent_s = self._clock() - self._heard_at
            if silent_s < self._heartbeat_s:
                await asyncio.sleep(self._heartbeat_s - silent_s)
                continue
            reply = await self._engine.GetLoad(engine_pb2.GetLoadRequest(), timeout=self._heartbeat_s)
            self._heard_at = self._clock()
            if self.load is not None:  # `serving` begins with the stream's own first load
                self._take_load(reply.load)
