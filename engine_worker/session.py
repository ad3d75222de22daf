"""One Serve stream: what its requests brought, merged until the router grants credit for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from glmserve.engine.v1 import engine_pb2

# Keep a response far below the message size limit: about 200 bytes a token, of the prompt too, with all its logprobs.
_MAX_TOKENS_PER_RESPONSE = 8192
# Beyond that the stream is not read until the client has taken some.
_MAX_UNREAD_REJECTIONS = 256


@dataclass(slots=True)
class _Merged:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[engine_pb2.TokenLogprobs] = field(default_factory=list)


class SubscriberSession:
    """Used from one event loop. A response with outputs takes one credit; a finish follows its request's last token."""

    def __init__(self, stream: int, max_requests: int) -> None:
        self.stream = stream
        self._max_requests = max_requests
        self._open: dict[int, str] = {}
        self._aborted: set[int] = set()
        self._credit = 0
        self._tokens: dict[int, _Merged] = {}
        # Of prompts whose first token has not been sent.
        self._prompt_logprobs: dict[int, list[engine_pb2.TokenLogprobs]] = {}
        self._finishes: dict[int, engine_pb2.Finish] = {}
        self._rejections: list[engine_pb2.Rejection] = []
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self._finishing = False

    # ---- requests ----

    def open(self, request_id: int, trace_id: str) -> None:
        self._open[request_id] = trace_id

    def is_known(self, request_id: int) -> bool:
        """Whether the id is in use: its finish has not been sent yet."""
        return request_id in self._open or request_id in self._finishes

    @property
    def is_full(self) -> bool:
        """Whether as many requests are open, or ended and not yet sent, as one stream may have."""
        return len(self._open) + len(self._finishes) >= self._max_requests

    def abort(self, request_id: int) -> bool:
        """Whether this is the first abort of an open request: others are not worth an engine's while."""
        if request_id not in self._open or request_id in self._aborted:
            return False
        self._aborted.add(request_id)
        return True

    def open_ids(self) -> list[int]:
        return list(self._open)

    # ---- what is to be sent ----

    def add_prompt_logprobs(self, request_id: int, logprobs: Sequence[engine_pb2.TokenLogprobs]) -> None:
        """Of the next tokens of the prompt; they go with the first token."""
        if request_id in self._open:
            self._prompt_logprobs.setdefault(request_id, []).extend(logprobs)

    def add_token(self, request_id: int, token_id: int, logprobs: engine_pb2.TokenLogprobs | None) -> None:
        if request_id not in self._open:
            return
        merged = self._tokens.get(request_id)
        if merged is None:
            merged = self._tokens[request_id] = _Merged()
        merged.token_ids.append(token_id)
        if logprobs is not None:
            merged.logprobs.append(logprobs)
        if self._credit:
            self._changed.set()

    def add_finish(self, finish: engine_pb2.Finish) -> str | None:
        """Returns the request's trace id; None if the request is not open here."""
        self._aborted.discard(finish.request_id)
        trace_id = self._open.pop(finish.request_id, None)
        if trace_id is not None:
            self._finishes[finish.request_id] = finish
            if finish.request_id not in self._tokens:
                self._prompt_logprobs.pop(finish.request_id, None)
            self._changed.set()
        return trace_id

    def reject(self, rejection: engine_pb2.Rejection) -> None:
        """Of a request that was opened: it is as if it had not been."""
        self._open.pop(rejection.request_id, None)
        self._prompt_logprobs.pop(rejection.request_id, None)
        self._aborted.discard(rejection.request_id)
        self.add_rejection(rejection)

    def add_rejection(self, rejection: engine_pb2.Rejection) -> None:
        self._rejections.append(rejection)
        if len(self._rejections) >= _MAX_UNREAD_REJECTIONS:
            self._room.clear()
        self._changed.set()

    def grant(self, credit: int) -> None:
        self._credit += credit
        self._changed.set()

    async def wait_for_room(self) -> None:
        """Until few enough rejections wait to be sent."""
        await self._room.wait()

    def finish(self) -> None:
        """`next_response` ends once all that is pending has been sent."""
        self._finishing = True
        self._changed.set()

    def close(self) -> None:
        """`next_response` ends at once."""
        self._closed = True
        self._room.set()
        self._changed.set()

    async def next_response(self) -> engine_pb2.ServeResponse | None:
        """Wait for something that may be sent; None at the end."""
        while not self._closed:
            response = self._take()
            if response is not None:
                return response
            if self._finishing and not (self._open or self._finishes):
                return None
            self._changed.clear()
            await self._changed.wait()
        return None

    def _take(self) -> engine_pb2.ServeResponse | None:
        response = engine_pb2.ServeResponse()
        if self._tokens and self._credit:
            self._credit -= 1
            self._take_tokens(response)
        for request_id in [id_ for id_ in self._finishes if id_ not in self._tokens]:
            response.finishes.append(self._finishes.pop(request_id))
        if self._rejections:
            response.rejections.extend(self._rejections)
            self._rejections.clear()
            self._room.set()
        return response if response.outputs or response.finishes or response.rejections else None

    def _take_tokens(self, response: engine_pb2.ServeResponse) -> None:
        budget = _MAX_TOKENS_PER_RESPONSE
        for request_id, merged in list(self._tokens.items()):
            count = min(budget, len(merged.token_ids))
            prompt_logprobs = self._prompt_logprobs.pop(request_id, ())
            response.outputs.add(
                request_id=request_id,
                token_ids=merged.token_ids[:count],
                logprobs=merged.logprobs[:count],
                prompt_logprobs=prompt_logprobs,
            )
            if count == len(merged.token_ids):
                del self._tokens[request_id]
            else:
                del merged.token_ids[:count], merged.logprobs[:count]
            budget -= count + len(prompt_logprobs)
            if budget <= 0:
                return
