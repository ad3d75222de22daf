"""EngineService: routes submits and aborts of many streams to the one engine loop, and what steps bring back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc
import structlog

from engine_worker.backlog import Backlog
from engine_worker.constraints.compiler import ConstraintCompiler, ConstraintError
from engine_worker.constraints.intake import ConstraintIntake
from engine_worker.errors import EngineFailedError
from engine_worker.expert_loads import ExpertLoads
from engine_worker.messages import finish_message, logprobs_message
from engine_worker.metrics import LoadSnapshot, load_message
from engine_worker.runtime.loop import LoopOutputs
from engine_worker.scheduler.request import Finish, Reason, Request, RequestKey
from engine_worker.session import SubscriberSession
from engine_worker.telemetry import WorkerTelemetry
from engine_worker.validation import InvalidFieldError, Validator
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from glmserve.service.pace import Pace

log = structlog.get_logger()

SERVICE_NAME: str = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
_LOAD_INTERVAL_S = 0.25

ServeContext = grpc.aio.ServicerContext[engine_pb2.ServeRequest, engine_pb2.ServeResponse]
Context = grpc.aio.ServicerContext[object, object]


class Loop(Protocol):
    """What the service needs of runtime.loop.EngineLoop."""

    def submit(self, request: Request) -> None: ...

    def abort(self, key: RequestKey) -> None: ...

    @property
    def step_age_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Admission:
    """Bounds on what the service accepts."""

    max_waiting_requests: int
    max_waiting_prompt_tokens: int
    max_requests_per_stream: int


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Lives on one event loop; the engine's thread hands results over through `deliver`, which alone is thread-safe."""

    def __init__(
        self,
        info: engine_pb2.GetInfoResponse,
        validator: Validator,
        admission: Admission,
        *,
        compiler: ConstraintCompiler,
        telemetry: WorkerTelemetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._validator = validator
        self._admission = admission
        self._telemetry = telemetry
        self._clock = clock
        self._event_loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[str] = self._event_loop.create_future()
        self._backlog = Backlog(admission.max_waiting_requests, admission.max_waiting_prompt_tokens)
        self._intake = ConstraintIntake(compiler, self._begin, self._refuse_constraint)
        self._sessions: dict[int, SubscriberSession] = {}
        self._streams = 0
        self._open_requests: set[RequestKey] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._engine_load = LoadSnapshot()
        self._expert_loads: ExpertLoads | None = None
        self._draining = False
        self._loop: Loop

    def attach(self, loop: Loop) -> None:
        """The loop that runs what is accepted: once, before the first call."""
        self._loop = loop
        self._telemetry.observe(self._load)
        self._telemetry.observe_experts(lambda: self._expert_loads)

    # ---- RPCs ----

    async def Serve(
        self, request_iterator: AsyncIterator[engine_pb2.ServeRequest], context: ServeContext
    ) -> AsyncIterator[engine_pb2.ServeResponse]:
        session = self._open_session()
        # A cancelled call may never resume this generator. grpc's published type is a class, not a function.
        context.add_done_callback(lambda _: self._close_session(session))  # type: ignore[arg-type]
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            load_sent = self._clock()
            yield engine_pb2.ServeResponse(load=self._load())
            while (response := await session.next_response()) is not None:
                # An end changes the load and may be the last thing said for long.
                ended = response.finishes or response.rejections
                if ended or self._draining or self._clock() - load_sent >= _LOAD_INTERVAL_S:
                    load_sent = self._clock()
                    response.load.CopyFrom(self._load())
                yield response
        finally:
            self._close_session(session)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def GetInfo(self, request: engine_pb2.GetInfoRequest, context: Context) -> engine_pb2.GetInfoResponse:
        return self._info

    async def GetLoad(self, request: engine_pb2.GetLoadRequest, context: Context) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=self._load())

    # ---- life ----

    async def generate(self, submit: engine_pb2.Submit) -> engine_pb2.Finish:
        """Run one request through the whole worker, as a stream would. Raises EngineFailedError if it is rejected."""
        session = self._open_session()
        try:
            session.grant(submit.sampling.max_tokens)
            self._submit(session, submit)
            while (response := await session.next_response()) is not None:
                for rejection in response.rejections:
                    raise EngineFailedError(f"{rejection.field} {rejection.message}")
                for finish in response.finishes:
                    return finish
            raise EngineFailedError("the stream ended before the request")
        finally:
            self._close_session(session)

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests; return when the open ones have ended, or after `limit_s`."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._none_open.wait(), limit_s)
        for finish in self._intake.abort_all(Reason.UNAVAILABLE, self._clock()):
            self._on_finish(finish)

    def finish_streams(self) -> None:
        """Let every stream end once its pending responses are sent."""
        for session in self._sessions.values():
            session.finish()

    async def wait_for_failure(self) -> None:
        """Raises EngineFailedError when the engine has failed."""
        raise EngineFailedError(await asyncio.shield(self._failure))

    def deliver(self, outputs: LoopOutputs) -> None:
        """From the engine's thread: take over what a step brought."""
        self._event_loop.call_soon_threadsafe(self._on_outputs, outputs)

    def take_expert_loads(self, loads: ExpertLoads) -> None:
        """The newest reading."""
        self._expert_loads = loads

    # ---- from the engine ----

    def _on_outputs(self, outputs: LoopOutputs) -> None:
        now = self._clock()
        self._engine_load = outputs.load
        self._telemetry.stepped(outputs.steps)
        for key in outputs.started:
            self._backlog.started(key, now)
        for key, scores in outputs.scores:
            session = self._sessions.get(key[0])
            if session is not None:
                session.add_prompt_logprobs(key[1], [logprobs_message(each) for each in scores])
        for key, token_id, logprobs in outputs.tokens:
            session = self._sessions.get(key[0])
            if session is not None:
                session.add_token(key[1], token_id, None if logprobs is None else logprobs_message(logprobs))
        for finish in outputs.finishes:
            self._on_finish(finish)
        if outputs.failure is not None and not self._failure.done():
            self._failure.set_result(outputs.failure)

    def _on_finish(self, finish: Finish) -> None:
        self._telemetry.finished(finish)
        self._forget(finish.key)
        stream, request_id = finish.key
        session = self._sessions.get(stream)
        trace_id = None if session is None else session.add_finish(finish_message(finish))
        usage = finish.usage
        decoding = usage.total_s - usage.first_token_s
        log.info(
            "request_finished",
            stream=stream,
            request_id=request_id,
            trace_id=trace_id,
            reason=finish.reason.name.lower(),
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            completion_tokens=usage.completion_tokens,
            preemptions=usage.preemptions,
            queue_ms=round(usage.queue_s * 1e3, 3),
            ttft_ms=round(usage.first_token_s * 1e3, 3),
            tps=round((usage.completion_tokens - 1) / decoding, 3)
            if decoding > 0 and usage.completion_tokens > 1
            else None,
        )

    def _forget(self, key: RequestKey) -> None:
        self._backlog.discard(key)
        self._open_requests.discard(key)
        if not self._open_requests:
            self._none_open.set()

    # ---- from the streams ----

    def _open_session(self) -> SubscriberSession:
        self._streams += 1
        session = SubscriberSession(self._streams, self._admission.max_requests_per_stream)
        self._sessions[session.stream] = session
        return session

    def _close_session(self, session: SubscriberSession) -> None:
        """Abort what the stream has open. Idempotent."""
        if self._sessions.pop(session.stream, None) is not None:
            session.close()
            for request_id in session.open_ids():
                self._abort((session.stream, request_id))

    async def _read(self, session: SubscriberSession, requests: AsyncIterator[engine_pb2.ServeRequest]) -> None:
        try:
            async for message in requests:
                for submit in message.submits:
                    self._submit(session, submit)
                for request_id in filter(session.abort, message.abort_request_ids):
                    self._abort((session.stream, request_id))
                if message.credit:
                    session.grant(message.credit)
                await session.wait_for_room()
        finally:
            session.close()

    def _submit(self, session: SubscriberSession, submit: engine_pb2.Submit) -> None:
        rejection = self._refuse(session, submit)
        if rejection is None:
            try:
                request = self._validator.request(session.stream, submit, self._clock())
            except InvalidFieldError as error:
                rejection = _rejection(submit, "INVALID", str(error), field=error.field)
        if rejection is not None:
            self._telemetry.rejected(rejection)
            session.add_rejection(rejection)
            return
        session.open(submit.request_id, submit.trace_id)
        if request.num_prompt_logprobs >= 0:
            session.add_prompt_logprobs(submit.request_id, [engine_pb2.TokenLogprobs()])
        self._backlog.add(request.key, request.prompt_len, request.arrival)
        self._open_requests.add(request.key)
        self._none_open.clear()
        if submit.sampling.HasField("constraint"):
            self._intake.add(request, submit)
        else:
            self._begin(request, submit)

    def _begin(self, request: Request, submit: engine_pb2.Submit) -> None:
        self._telemetry.accepted(request.key, submit)
        self._loop.submit(request)

    def _refuse_constraint(self, key: RequestKey, submit: engine_pb2.Submit, error: ConstraintError) -> None:
        field = f"sampling.constraint.{error.field}".rstrip(".")
        rejection = _rejection(submit, "INVALID", str(error), field=field)
        self._telemetry.rejected(rejection)
        self._forget(key)
        session = self._sessions.get(key[0])
        if session is not None:
            session.reject(rejection)

    def _abort(self, key: RequestKey) -> None:
        finish = self._intake.abort(key, Reason.ABORTED, self._clock())
        if finish is None:
            self._loop.abort(key)
        else:
            self._on_finish(finish)

    def _refuse(self, session: SubscriberSession, submit: engine_pb2.Submit) -> engine_pb2.Rejection | None:
        """What keeps the worker from taking any such request now."""
        if self._failure.done():
            return _rejection(submit, "UNAVAILABLE", "the engine has failed")
        if self._draining:
            return _rejection(submit, "UNAVAILABLE", "the worker is shutting down")
        if session.is_known(submit.request_id):
            message = f"is {submit.request_id}, allowed: an id that is not in use on this stream"
            return _rejection(submit, "INVALID", message, field="request_id")
        load = self._engine_load
        free_places = self._info.max_running_requests - load.running_requests
        queue_s = self._backlog.queue_s(load.pace, free_places, load.running_prompt_tokens)
        reason = None
        # What another worker had begun was admitted there: only the bound of the stream holds for it.
        if not submit.generated_token_ids:
            reason = self._backlog.refusal(len(submit.prompt_token_ids))
            # An idle engine takes anything: its pace is of another time, and is measured again by taking it.
            if reason is None and self._open_requests:
                reason = _too_late(submit, load.pace, queue_s)
        if session.is_full:
            reason = f"the stream has {self._admission.max_requests_per_stream} requests open or unread, its maximum"
        if reason is None:
            return None
        return _rejection(submit, "OVERLOADED", reason, retry_after_ms=self._backlog.retry_after_ms(queue_s))

    def _load(self) -> engine_pb2.Load:
        return load_message(
            self._engine_load,
            open_requests=len(self._open_requests),
            waiting_prompt_tokens=self._backlog.prompt_tokens,
            draining=self._draining,
            step_age_s=self._loop.step_age_s,
            experts=self._expert_loads,
        )


def _too_late(submit: engine_pb2.Submit, pace: Pace, queue_s: float) -> str | None:
    """Why the request cannot meet its deadline, or None."""
    first_token_ms = int((queue_s + pace.prefill_s(len(submit.prompt_token_ids))) * 1000)
    if not submit.HasField("timeout_ms") or first_token_ms <= submit.timeout_ms:
        return None
    return f"the deadline is in {submit.timeout_ms} ms, the first token is expected in {first_token_ms} ms"


def _rejection(
    submit: engine_pb2.Submit, reason: str, message: str, *, field: str = "", retry_after_ms: int = 0
) -> engine_pb2.Rejection:
    return engine_pb2.Rejection(
        request_id=submit.request_id,
        reason=engine_pb2.RejectionReason.Value(f"REJECTION_REASON_{reason}"),
        field=field,
        message=message,
        retry_after_ms=retry_after_ms,
    )
