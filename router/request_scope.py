"""What one streamed request holds and what is logged of it, from receipt to the end of its RPC."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Iterator

import structlog

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import DeadlineError, OverloadedError, ServiceError
from glmserve.service.tracing import TRACEPARENT_KEY, trace_id_of
from router.call import Call
from router.dispatch.admission import Ticket
from router.dispatch.request_run import RequestRun
from router.telemetry import RequestRecord, RouterTelemetry

log = structlog.get_logger()

REQUEST_ID_KEY = "x-request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestScope:
    """Closed exactly once, by whoever ends the RPC; closing gives everything back, whatever state the request is in.

    Times are in seconds of `time.perf_counter`.
    """

    def __init__(self, method: str, request_id: str, call: Call, telemetry: RouterTelemetry, traceparent: str) -> None:
        """`traceparent`: the client's, or ""."""
        self.request_id = request_id
        self.started = time.perf_counter()
        self.submitted_at: float | None = None
        self.first_token_at: float | None = None
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._telemetry = telemetry
        self._trace = telemetry.begin(method, call.protocol, traceparent)
        self.traceparent = traceparent if self._trace is None else self._trace.traceparent
        self.trace_id = trace_id_of(self.traceparent) or request_id
        self._method = method
        self._caller = call.caller.name
        self._deadline_s = call.time_remaining()
        self._finish: inference_pb2.Finish | None = None
        # Until something else is known: nobody but the client ends an RPC without a word.
        self._status = "CANCELLED"
        self._overload: str | None = None
        self._ticket: Ticket | None = None
        self._runs: list[RequestRun] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left_s(self) -> float | None:
        """What is left of the deadline; None: there is none. Raises DeadlineError: nothing."""
        if self._deadline_s is None:
            return None
        left = self.started + self._deadline_s - time.perf_counter()
        if left <= 0:
            raise DeadlineError("the deadline passed before the request reached a worker")
        return left

    def timeout_ms(self) -> int | None:
        """The same for the worker."""
        left = self.left_s
        return None if left is None else min(max(int(left * 1000), 1), 2**32 - 1)

    def hold_ticket(self, ticket: Ticket) -> None:
        """Give `ticket` back at the end."""
        self._ticket = ticket

    def add_prompt(self, tokens: int, least_tokens: int) -> None:
        """Count the prompt's ids; at least `least_tokens` will follow. Raises OverloadedError: no room or time."""
        assert self._ticket is not None
        self._ticket.add_prompt(tokens, least_tokens, self.left_s)
        self.prompt_tokens = tokens

    def hold_run(self, run: RequestRun) -> None:
        """Release `run` at the end, and fail it when the deadline passes."""
        if self.submitted_at is None:
            self.submitted_at = time.perf_counter()
        self._runs.append(run)
        left_s = self.left_s
        if left_s is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._time_out)

    def hold_task(self, task: asyncio.Task[None]) -> None:
        """Cancel `task` at the end."""
        self._tasks.append(task)

    def began(self) -> None:
        """A token is there."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
            if self._ticket is not None:
                self._ticket.began()

    def finish(self, finish: inference_pb2.Finish) -> None:
        """A choice has its result. What is told of the request is what holds for the first to end."""
        if self._finish is None:
            self._finish = finish

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember how the body ended."""
        try:
            yield
            self._status = "OK"
        except ServiceError as error:
            self._status = error.code.name
            self._overload = error.reason if isinstance(error, OverloadedError) else None
            raise
        except Exception:
            self._status = "INTERNAL"
            raise

    def close(self) -> None:
        """Give everything back and write the log line."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for run in self._runs:
            run.release()
        if self._ticket is not None:
            self._ticket.leave(self.completion_tokens)
        record = self._record()
        self._log(record)
        self._telemetry.end(record, self._trace)

    def _time_out(self) -> None:
        for run in self._runs:
            run.fail(DeadlineError("the deadline passed before the request was done"))

    def _record(self) -> RequestRecord:
        now = time.perf_counter()
        status, finish = self._status, self._finish
        if status == "CANCELLED" and self._deadline_s is not None and now >= self.started + self._deadline_s:
            status = "DEADLINE_EXCEEDED"
        return RequestRecord(
            method=self._method,
            request_id=self.request_id,
            status=status,
            overload=self._overload,
            finish=None if finish is None else _finish_name(finish),
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=0 if finish is None else finish.usage.cached_prompt_tokens,
            completion_tokens=self.completion_tokens,
            submitted_s=None if self.submitted_at is None else self.submitted_at - self.started,
            first_token_s=None if self.first_token_at is None else self.first_token_at - self.started,
            total_s=now - self.started,
        )

    def _log(self, record: RequestRecord) -> None:
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "method": record.method,
            "caller": self._caller,
            "status": record.status,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "total_ms": _milliseconds(record.total_s),
        }
        if record.overload is not None:
            fields["overload"] = record.overload
        if record.finish is not None:
            fields["finish"] = record.finish
        if record.first_token_s is not None:
            fields["ttft_ms"] = _milliseconds(record.first_token_s)
        if record.seconds_per_token is not None:
            fields["tps"] = round(1 / max(record.seconds_per_token, 1e-6), 2)
        log.info("request", **fields)


async def open_scope(call: Call, method: str, telemetry: RouterTelemetry) -> RequestScope:
    """Begin a request, which the call's end closes. Its id (the client's if sane) goes back before anything else."""
    given = call.headers.get(REQUEST_ID_KEY, "")
    request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
    context_given = call.headers.get(TRACEPARENT_KEY, "")
    traceparent = context_given if trace_id_of(context_given) else ""
    scope = RequestScope(method, request_id, call, telemetry, traceparent)
    # A callback, not `finally`: a call cancelled while a response is being written leaves its generator unfinished.
    call.add_done_callback(scope.close)
    await call.accept({REQUEST_ID_KEY: request_id})
    return scope


def _finish_name(finish: inference_pb2.Finish) -> str:
    return inference_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
