"""What one streamed request holds and what is logged of it, from receipt to the end of its RPC."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import structlog

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import DeadlineError, ServiceError
from router.dispatch.admission import Ticket
from router.dispatch.serve_session import ServeSession
from router.dispatch.token_stream import TokenStream

log = structlog.get_logger()

REQUEST_ID_KEY = "x-request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestScope:
    """Closed exactly once, by whoever ends the RPC; closing gives everything back, whatever state the request is in.

    Times are in seconds of `time.perf_counter`.
    """

    def __init__(self, method: str, request_id: str, deadline_s: float | None) -> None:
        """`deadline_s`: seconds the client gives us from now; None: no end."""
        self.request_id = request_id
        self.started = time.perf_counter()
        self.first_token_at: float | None = None
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._method = method
        self._deadline_s = deadline_s
        self._finish: inference_pb2.Finish | None = None
        # Until something else is known: nobody but the client ends an RPC without a word.
        self._status = "CANCELLED"
        self._ticket: Ticket | None = None
        self._stream: tuple[ServeSession, TokenStream] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def timeout_ms(self) -> int | None:
        """What is left of the deadline, for the worker. Raises DeadlineError: nothing."""
        if self._deadline_s is None:
            return None
        left = self.started + self._deadline_s - time.perf_counter()
        if left <= 0:
            raise DeadlineError("the deadline passed before the request reached the worker")
        return min(max(int(left * 1000), 1), 2**32 - 1)

    def hold_ticket(self, ticket: Ticket) -> None:
        """Give `ticket` back at the end."""
        self._ticket = ticket

    def add_prompt(self, tokens: int) -> None:
        """Count the prompt's ids. Raises OverloadedError: no room for them."""
        assert self._ticket is not None
        self._ticket.add_prompt(tokens)
        self.prompt_tokens = tokens

    def hold_stream(self, session: ServeSession, stream: TokenStream) -> None:
        """Release `stream` at the end, and fail it when the deadline passes."""
        self._stream = (session, stream)
        timeout_ms = self.timeout_ms
        if timeout_ms is not None:
            error = DeadlineError("the deadline passed before the request was done")
            self._timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, stream.fail, error)

    def finish(self, finish: inference_pb2.Finish) -> None:
        """The request has its result."""
        self._finish = finish

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember how the body ended."""
        try:
            yield
            self._status = "OK"
        except ServiceError as error:
            self._status = error.code.name
            raise
        except Exception:
            self._status = "INTERNAL"
            raise

    def close(self) -> None:
        """Give everything back and write the log line."""
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            session, stream = self._stream
            session.release(stream)
        if self._ticket is not None:
            self._ticket.leave()
        self._log()

    def _log(self) -> None:
        now = time.perf_counter()
        status = self._status
        if status == "CANCELLED" and self._deadline_s is not None and now >= self.started + self._deadline_s:
            status = "DEADLINE_EXCEEDED"
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "method": self._method,
            "status": status,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_ms": _milliseconds(now - self.started),
        }
        if self._finish is not None:
            fields["finish"] = (
                inference_pb2.FinishReason.Name(self._finish.reason).removeprefix("FINISH_REASON_").lower()
            )
        if self.first_token_at is not None:
            fields["ttft_ms"] = _milliseconds(self.first_token_at - self.started)
            if self.completion_tokens > 1:
                # Of decoding: the first token's time is ttft_ms.
                fields["tps"] = round((self.completion_tokens - 1) / max(now - self.first_token_at, 1e-6), 2)
        log.info("request", **fields)


async def open_scope(context: grpc.aio.ServicerContext[Any, Any], method: str) -> RequestScope:
    """Begin a request, which the RPC's end closes. Its id (the client's if sane) goes back in the initial metadata."""
    metadata: Mapping[str, str | bytes] = dict(context.invocation_metadata() or ())
    given = metadata.get(REQUEST_ID_KEY)
    request_id = given if isinstance(given, str) and _SANE_ID.fullmatch(given) else uuid.uuid4().hex
    scope = RequestScope(method, request_id, context.time_remaining())
    # A callback, not `finally`: an RPC cancelled while a response is being written leaves its generator unfinished.
    context.add_done_callback(lambda _context: scope.close())  # type: ignore[arg-type]
    await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
    return scope


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
