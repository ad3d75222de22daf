"""A worker's service over a real socket, on the scripted engine; and a client of its stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from engine_worker.constraints.compiler import ConstraintCompiler
from engine_worker.constraints.masks import MaskFiller
from engine_worker.runtime.loop import EngineLoop
from engine_worker.runtime.step import StepPacker
from engine_worker.scheduler.limits import Limits
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.service import SERVICE_NAME, Admission, EngineService
from engine_worker.telemetry import WorkerTelemetry
from engine_worker.validation import Validator
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from glmserve.service.grpc_server import start_server
from glmserve.service.telemetry import Telemetry
from tests.unit.scripted_engine import VOCAB, ScriptedEngine

PAGE = 16
_OFF = Telemetry()
EOS = 49


def worker_limits(*, num_pages: int = 64, max_context: int = 256, max_running: int = 8) -> Limits:
    return Limits(
        num_pages=num_pages, page_size=PAGE, max_context=max_context, max_running=max_running, max_step_tokens=64
    )


@dataclass
class Worker:
    service: EngineService
    loop: EngineLoop
    engine: ScriptedEngine
    channel: grpc.aio.Channel
    server: grpc.aio.Server
    address: str

    @property
    def client(self) -> engine_pb2_grpc.EngineServiceAsyncStub:
        return engine_pb2_grpc.EngineServiceStub(self.channel)

    @contextlib.asynccontextmanager
    async def stream(self, credit: int = 1_000_000) -> AsyncIterator[Stream]:
        """An open Serve stream whose first response has been read."""
        stream = Stream(self.client.Serve())
        first = await stream.call.read()
        assert isinstance(first, engine_pb2.ServeResponse)
        assert first.HasField("load"), "the first response of a stream has the load"
        if credit:
            await stream.send(credit=credit)
        try:
            yield stream
        finally:
            stream.call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await stream.call.code()

    async def load(self) -> engine_pb2.Load:
        return (await self.client.GetLoad(engine_pb2.GetLoadRequest())).load

    async def wait_for_load(self, holds: Callable[[engine_pb2.Load], bool]) -> engine_pb2.Load:
        while not holds(load := await self.load()):
            pass
        return load


@contextlib.asynccontextmanager
async def running_worker(
    limits: Limits | None = None,
    *,
    max_waiting: int = 100,
    max_waiting_tokens: int = 10_000,
    per_stream: int = 200,
    telemetry: Telemetry = _OFF,
    listen: str = "127.0.0.1:0",
    model: Path | None = None,
) -> AsyncIterator[Worker]:
    limits = limits or worker_limits()
    engine = ScriptedEngine(limits.num_pages, limits.page_size)
    service = EngineService(
        engine_pb2.GetInfoResponse(model_name="scripted", vocab_size=VOCAB, max_context=limits.max_context),
        Validator(VOCAB, (EOS,), limits),
        Admission(max_waiting, max_waiting_tokens, per_stream),
        compiler=ConstraintCompiler(model or Path(), VOCAB, (EOS,)),
        telemetry=WorkerTelemetry(telemetry),
    )
    packer = StepPacker(limits.max_step_tokens, limits.max_running, limits.max_context // limits.page_size)
    masks = MaskFiller(limits.max_running, VOCAB)
    loop = EngineLoop(engine, Scheduler(limits), packer, masks, service.deliver, max_in_flight=2)
    service.attach(loop)
    loop.start()

    def register(server: grpc.aio.Server) -> None:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(service, server)

    started = await start_server(register, [SERVICE_NAME], listen, 2**24)
    await started.set_serving(True)
    try:
        async with grpc.aio.insecure_channel(started.address) as channel:
            yield Worker(service, loop, engine, channel, started.server, started.address)
    finally:
        service.finish_streams()
        await started.server.stop(1)
        await asyncio.to_thread(loop.stop)


@dataclass
class Ended:
    """All that a stream said of one request."""

    responses: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[engine_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[engine_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs_at: list[int] = field(default_factory=list)
    finish: engine_pb2.Finish | None = None
    rejection: engine_pb2.Rejection | None = None


@dataclass
class Stream:
    call: grpc.aio.StreamStreamCall[engine_pb2.ServeRequest, engine_pb2.ServeResponse]
    ends: dict[int, Ended] = field(default_factory=dict)

    async def send(self, *submits: engine_pb2.Submit, aborts: Sequence[int] = (), credit: int = 0) -> None:
        await self.call.write(engine_pb2.ServeRequest(submits=submits, abort_request_ids=aborts, credit=credit))

    async def read(self) -> engine_pb2.ServeResponse:
        """The next response, noted in `ends`."""
        response = await self.call.read()
        assert isinstance(response, engine_pb2.ServeResponse), "the stream has ended"
        for output in response.outputs:
            ended = self._of(output.request_id)
            assert ended.finish is None, "tokens after the finish"
            if output.prompt_logprobs:
                ended.prompt_logprobs_at.append(ended.responses)
                ended.prompt_logprobs += output.prompt_logprobs
            ended.responses += 1
            ended.token_ids += output.token_ids
            ended.logprobs += output.logprobs
        for finish in response.finishes:
            ended = self._of(finish.request_id)
            assert ended.finish is None, "two finishes"
            ended.finish = finish
        for rejection in response.rejections:
            self._of(rejection.request_id).rejection = rejection
        return response

    async def end_of(self, request_id: int) -> Ended:
        """Read until the request has a finish or a rejection."""
        while (ended := self._of(request_id)).finish is None and ended.rejection is None:
            await self.read()
        return ended

    def _of(self, request_id: int) -> Ended:
        return self.ends.setdefault(request_id, Ended())


def submit(
    request_id: int,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 8,
    *,
    generated: Sequence[int] = (),
    timeout_ms: int | None = None,
    priority: int = 0,
    seed: int | None = 7,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = True,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> engine_pb2.Submit:
    sampling = engine_pb2.SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return engine_pb2.Submit(
        request_id=request_id,
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        sampling=sampling,
        timeout_ms=timeout_ms,
        priority=priority,
    )
