"""One request on as many workers as it takes: when one is lost, another goes on from the tokens so far.

The tokens are those of an undisturbed run, because the seed is fixed and a token depends on nothing but seed, position
and the tokens before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from glmserve.engine.v1 import engine_pb2
from glmserve.service.status import InternalError, OverloadedError, ServiceError, UnavailableError
from router.dispatch.outcomes import finish_error
from router.dispatch.serve_session import ServeSession
from router.dispatch.token_stream import Chunk, TokenStream
from router.dispatch.worker_link import WorkerLink
from router.dispatch.worker_pool import WorkerPool
from router.errors import WorkerLostError

log = structlog.get_logger()

# A breaker closes by time alone, which no signal tells.
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    """`moves`: how often a request may be moved, so that one that kills workers does not kill them all.

    `wait_s`: how long it then may wait for a worker that takes it.
    """

    moves: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the request runs."""

    link: WorkerLink
    session: ServeSession
    stream: TokenStream

    def end(self, error: ServiceError | None) -> None:
        """Tell the breaker how it went: None, well. A lost link is told once, by the link."""
        if error is None:
            self.link.breaker.succeeded()
        elif isinstance(error, InternalError) or (isinstance(error, WorkerLostError) and self.session.serving):
            self.link.breaker.failed()
        else:
            self.link.breaker.neutral()


class RequestRun:
    """Reads like a TokenStream that outlives its worker. To be released when nobody reads any more."""

    def __init__(
        self,
        pool: WorkerPool,
        submit: engine_pb2.Submit,
        request_id: str,
        timeout_ms: Callable[[], int | None],
        limits: FailoverLimits,
    ) -> None:
        """`submit`: with a seed. `request_id`: for logs.

        `timeout_ms`: what is left of the deadline; raises DeadlineError: nothing.
        Raises UnavailableError: no worker takes requests now.
        """
        self._pool = pool
        self._submit = submit
        self._request_id = request_id
        self._timeout_ms = timeout_ms
        self._limits = limits
        self._tokens: list[int] = []
        self._usage: engine_pb2.Usage | None = None
        self._error: ServiceError | None = None
        self._submitted_at = time.monotonic()
        self._moves = 0
        self._move_until = 0.0
        self._avoid: set[str] = set()
        # Where a worker said that it ends: it may seem to serve for a moment yet.
        self._left: set[ServeSession] = set()
        self._aborted = False
        self._released = False
        link = pool.pick(submit.prompt_token_ids, max_tokens=submit.sampling.max_tokens)
        self._info = link.info
        self._place = self._take_place(link)

    async def read(self) -> Chunk:
        """Wait for news and take it all; a chunk with a finish is the last. Raises ServiceError: the request failed."""
        while True:
            if self._error is not None:
                error, self._error = self._error, None
                finish = await self._recover(error)
                if finish is not None:
                    return Chunk(finish=finish)
            chunk = await self._next_chunk()
            if chunk.token_ids or chunk.finish is not None:
                return chunk

    def abort(self) -> None:
        """What came is enough: end with a finish of any kind, or an error if the worker is lost meanwhile."""
        self._aborted = True
        self._place.session.abort(self._place.stream)

    def fail(self, error: ServiceError) -> None:
        """End with an error, which the reader gets after the ids that came before."""
        self._place.stream.fail(error)

    def release(self) -> None:
        """Abort what still runs. Idempotent."""
        if not self._released:
            self._released = True
            if not self._place_ended:
                self._place.link.breaker.neutral()
                self._place.session.release(self._place.stream)

    # ---- one place ----

    def _take_place(self, link: WorkerLink) -> _Place:
        if self._released:
            raise asyncio.CancelledError  # the RPC has ended, its task is about to hear of it
        submit = engine_pb2.Submit()
        submit.CopyFrom(self._submit)
        submit.generated_token_ids.extend(self._tokens)
        if self._tokens:  # they came with the first token
            submit.sampling.ClearField("prompt_logprobs")
        submit.age_ms = min(int((time.monotonic() - self._submitted_at) * 1000), 2**32 - 1)
        timeout_ms = self._timeout_ms()
        if timeout_ms is not None:
            submit.timeout_ms = timeout_ms
        self._place_ended = False
        return _Place(link, *link.submit(submit))

    async def _next_chunk(self) -> Chunk:
        """What comes next from this place; its error is kept for after the ids that came with it."""
        try:
            chunk = await self._place.stream.read()
        except ServiceError as failure:
            self._end_place(failure)
            return Chunk()
        self._tokens += chunk.token_ids
        finish = chunk.finish
        if finish is None:
            return chunk
        error = None if self._aborted else finish_error(finish, self._request_id)
        self._end_place(error)
        if error is None:
            self._count_once(finish)
        else:
            self._usage = self._usage or finish.usage
            chunk.finish = None
        return chunk

    def _end_place(self, error: ServiceError | None) -> None:
        self._error = error
        self._place_ended = True
        self._place.end(error)
        self._place.session.release(self._place.stream)

    def _count_once(self, finish: engine_pb2.Finish) -> None:
        """What the first worker told of cache and queue holds; a later one found its prompt anew."""
        if self._usage is not None:
            finish.usage.cached_prompt_tokens = self._usage.cached_prompt_tokens
            finish.usage.queue_us = self._usage.queue_us

    # ---- from one place to the next ----

    async def _recover(self, error: ServiceError) -> engine_pb2.Finish | None:
        """Find another place, or the finish if nothing is left to do. Raises ServiceError: neither is possible."""
        if self._aborted or not isinstance(error, WorkerLostError | OverloadedError):
            raise error
        finish = self._missed_finish()
        if finish is None:
            before = self._place.link.address
            self._place = await self._next_place(error)
            log.warning(
                "request_moved",
                request_id=self._request_id,
                tokens=len(self._tokens),
                before=before,
                worker=self._place.link.address,
                reason=str(error),
            )
        return finish

    def _missed_finish(self) -> engine_pb2.Finish | None:
        """The finish, if all tokens came and only it was lost."""
        params = self._submit.sampling
        finish = engine_pb2.Finish(seed=params.seed, usage=self._usage)
        eos = () if params.ignore_eos else self._info.eos_token_ids
        if self._tokens and self._tokens[-1] in (*eos, *params.stop_token_ids):
            finish.reason = engine_pb2.FINISH_REASON_STOP
            finish.stop_token_id = self._tokens[-1]
            return finish
        if len(self._tokens) >= params.max_tokens:
            finish.reason = engine_pb2.FINISH_REASON_LENGTH
            return finish
        return None

    async def _next_place(self, error: WorkerLostError | OverloadedError) -> _Place:
        """Raises `error`: nobody takes the request. What no worker has begun is not kept waiting for a full one."""
        overloaded = isinstance(error, OverloadedError)
        if not overloaded:
            self._left.add(self._place.session)
            self._moves += 1
            self._move_until = time.monotonic() + self._limits.wait_s
            if self._moves > self._limits.moves:
                raise error
        self._avoid.add(self._place.link.address)
        while True:
            seen = self._pool.changed.count
            link = self._pick()
            if link is not None and not (overloaded and link.address in self._avoid):
                return self._take_place(link)
            left_s = self._move_until - time.monotonic()
            if left_s <= 0:
                raise error
            self._timeout_ms()
            if isinstance(error, OverloadedError) and overloaded:
                await asyncio.sleep(min(left_s, error.retry_after_ms / 1000))
                overloaded = False
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._pool.changed.wait_beyond(seen), min(left_s, _POLL_S))

    def _pick(self) -> WorkerLink | None:
        try:
            return self._pool.pick(
                self._submit.prompt_token_ids,
                max_tokens=self._submit.sampling.max_tokens,
                avoid=self._avoid,
                left=self._left,
                revision=self._info.model_revision,
            )
        except UnavailableError:
            return None
