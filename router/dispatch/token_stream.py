"""What the worker says of one request, from the link to the one task that reads it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from glmserve.engine.v1 import engine_pb2
from glmserve.service.status import ServiceError


@dataclass(slots=True)
class Chunk:
    """Everything that came since the last read. `logprobs`: one for each id, or empty if not asked for.

    `prompt_logprobs`: the same of the prompt, once.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[engine_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[engine_pb2.TokenLogprobs] = field(default_factory=list)
    finish: engine_pb2.Finish | None = None


class TokenStream:
    """Ids of one request. A reader that lags gets them merged into one chunk, so memory is bounded by max_tokens ids.

    The link pushes and ends it (with a finish or an error, exactly one of them counts); one task reads it.
    """

    __slots__ = ("_chunk", "_error", "_waiter", "ended", "request_id")

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.ended = False
        self._chunk = Chunk()
        self._error: ServiceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: engine_pb2.SequenceOutput) -> None:
        """Add a step's new ids."""
        self._chunk.token_ids.extend(output.token_ids)
        if output.logprobs:
            self._chunk.logprobs.extend(output.logprobs)
        if output.prompt_logprobs:
            self._chunk.prompt_logprobs.extend(output.prompt_logprobs)
        self._wake()

    def finish(self, finish: engine_pb2.Finish) -> None:
        """The worker's last word."""
        if not self.ended:
            self.ended = True
            self._chunk.finish = finish
            self._wake()

    def fail(self, error: ServiceError) -> None:
        """End with an error, which the reader gets after the ids that came before."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._wake()

    async def read(self) -> Chunk:
        """Wait for news and take it all; a chunk with a finish is the last. Raises ServiceError: the stream failed."""
        if not self._has_news():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunk, self._chunk = self._chunk, Chunk()
        if self._error is not None and not chunk.token_ids:
            raise self._error
        return chunk

    def _has_news(self) -> bool:
        return bool(self._chunk.token_ids) or self.ended

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
