"""The choices of one request: the first computes the prompt, the others begin when it has, and share its pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from glmserve.inference.v1 import inference_pb2
from router.generation import Delta, Generation
from router.request_scope import RequestScope
from router.text.reader import Piece

# Of those that wait for the reader of all choices; beyond, steps merge on the way here.
_MAX_DELTAS = 16


def run_choices(scope: RequestScope, begin: Callable[[int], Generation], num_choices: int) -> AsyncIterator[Delta]:
    """What the client gets of all choices, each in order. `begin`: makes the choice of this number."""
    return begin(0).deltas() if num_choices == 1 else _Merged(scope, begin, num_choices).deltas()


async def best_choices(deltas: AsyncIterator[Delta], num_best: int, *, logprobs: bool) -> AsyncIterator[Delta]:
    """The choices with the largest mean log-probability, best first, numbered anew, whole, once all are done.

    `deltas`: with the log-probability of every id. `logprobs`: pass them on.
    """
    choices: dict[int, list[Delta]] = {}
    async for delta in deltas:
        choices.setdefault(delta.choice, []).append(delta)
    ranked = sorted(choices.values(), key=_mean_logprob, reverse=True)
    for number, parts in enumerate(ranked[:num_best]):
        yield _whole(number, parts, logprobs=logprobs)


class _Merged:
    """One task a choice, which the end of the request cancels."""

    def __init__(self, scope: RequestScope, begin: Callable[[int], Generation], num_choices: int) -> None:
        self._scope = scope
        self._begin = begin
        self._num_choices = num_choices
        self._arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue(_MAX_DELTAS)

    async def deltas(self) -> AsyncIterator[Delta]:
        self._start(0)
        prompt_logprobs: Sequence[inference_pb2.TokenLogprob] = ()
        begun: set[int] = set()
        num_running = self._num_choices
        while num_running:
            delta = await self._arrived.get()
            if isinstance(delta, Exception):
                raise delta
            if not begun:
                prompt_logprobs = delta.prompt_logprobs
                for choice in range(1, self._num_choices):
                    self._start(choice)
            if delta.choice not in begun:
                begun.add(delta.choice)
                delta.prompt_logprobs = prompt_logprobs
            num_running -= delta.finish is not None
            yield delta

    def _start(self, choice: int) -> None:
        self._scope.hold_task(asyncio.create_task(self._pump(choice)))

    async def _pump(self, choice: int) -> None:
        try:
            async for delta in self._begin(choice).deltas():
                await self._arrived.put(delta)
        except Exception as error:  # it is the reader's, whatever it is
            await self._arrived.put(error)


def _mean_logprob(parts: Sequence[Delta]) -> float:
    logprobs = [each.logprob for delta in parts for each in delta.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _whole(number: int, parts: Sequence[Delta], *, logprobs: bool) -> Delta:
    return Delta(
        number,
        Piece(
            "".join(delta.piece.content for delta in parts),
            "".join(delta.piece.reasoning for delta in parts),
            _whole_calls([call for delta in parts for call in delta.piece.calls]),
        ),
        [token_id for delta in parts for token_id in delta.token_ids],
        [each for delta in parts for each in delta.logprobs] if logprobs else (),
        parts[0].prompt_logprobs,
        parts[-1].finish,
    )


def _whole_calls(pieces: Sequence[inference_pb2.ToolCallDelta]) -> list[inference_pb2.ToolCallDelta]:
    whole: list[inference_pb2.ToolCallDelta] = []
    for piece in pieces:
        if piece.id:
            whole.append(piece)
        else:
            whole[piece.index].arguments_json += piece.arguments_json
    return whole
