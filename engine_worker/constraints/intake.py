"""Requests between their acceptance and the engine's queue: their constraints are being compiled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from engine_worker.constraints.compiler import ConstraintCompiler, ConstraintError
from engine_worker.scheduler.request import Finish, Reason, Request, RequestKey
from glmserve.engine.v1 import engine_pb2


class _Entry(NamedTuple):
    request: Request
    task: asyncio.Task[None]


class ConstraintIntake:
    """Used from one event loop. Each request that is added comes out once: by `begin`, by `refuse`, or as a finish."""

    def __init__(
        self,
        compiler: ConstraintCompiler,
        begin: Callable[[Request, engine_pb2.Submit], None],
        refuse: Callable[[RequestKey, engine_pb2.Submit, ConstraintError], None],
    ) -> None:
        """`begin` gets the request with its constraint; `refuse` gets the error, whose field is of the constraint."""
        self._compiler = compiler
        self._begin = begin
        self._refuse = refuse
        self._entries: dict[RequestKey, _Entry] = {}

    def add(self, request: Request, submit: engine_pb2.Submit) -> None:
        """Compile the constraint that `submit` has."""
        self._entries[request.key] = _Entry(request, asyncio.create_task(self._compile(request, submit)))

    def abort(self, key: RequestKey, reason: Reason, now: float) -> Finish | None:
        """End a request that is here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        entry.task.cancel()
        return entry.request.finish(reason, now)

    def abort_all(self, reason: Reason, now: float) -> list[Finish]:
        """End all that are here."""
        return [finish for key in list(self._entries) if (finish := self.abort(key, reason, now)) is not None]

    async def _compile(self, request: Request, submit: engine_pb2.Submit) -> None:
        sampling = submit.sampling
        compiled = self._compiler.compile(sampling.constraint, sampling.min_tokens, list(submit.generated_token_ids))
        try:
            request.constraint = await asyncio.wrap_future(compiled)
        except ConstraintError as error:
            del self._entries[request.key]
            self._refuse(request.key, submit, error)
            return
        del self._entries[request.key]
        self._begin(request, submit)
