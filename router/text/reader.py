"""Ids to what a client gets: the common face of all ways to read them, and the plainest of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from glmserve.inference.v1 import inference_pb2
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings


@dataclass(slots=True)
class Piece:
    """What a message to the client carries of the answer."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[inference_pb2.ToolCallDelta] = ()


class Reader(Protocol):
    """Reads the ids of one choice. Pieces concatenate to the same answer, however the ids are cut."""

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text; None: none did."""

    @property
    def ended(self) -> bool:
        """Nothing can follow: a stop string is complete, or all that was asked for is there."""

    @property
    def reasoning_tokens(self) -> int:
        """How many of the ids are of the reasoning."""

    @property
    def calls_whole(self) -> bool:
        """There are tool calls, and each of them is complete."""

    def push(self, ids: Sequence[int]) -> int:
        """Read `ids` until the text ends. Returns how many that took."""

    def finish(self, *, stopped: bool) -> None:
        """No id follows. `stopped`: because the model ended the answer."""

    def take(self) -> Piece:
        """What is new since this was last called."""


class TextReader:
    """All is text, which ends before the first stop string."""

    calls_whole = False
    reasoning_tokens = 0

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int, beginning: str) -> None:
        """The first `min_tokens` ids cannot end the text, nor begin what ends it. `beginning`: of the text."""
        self._detokenizer = detokenizer
        self._has_stops = bool(stops)
        self._stops = StopStrings(stops)
        self._exempt = min_tokens
        self._text = beginning

    @property
    def stop(self) -> str | None:
        return self._stops.matched

    @property
    def ended(self) -> bool:
        return self._stops.matched is not None

    def push(self, ids: Sequence[int]) -> int:
        if not self._has_stops:
            self._text += self._detokenizer.push(ids)
            return len(ids)
        for position, token_id in enumerate(ids):
            text = self._detokenizer.push((token_id,))
            self._text += text if position < self._exempt else self._stops.push(text)
            if self.ended:
                return position + 1
        self._exempt -= len(ids)
        return len(ids)

    def finish(self, *, stopped: bool) -> None:
        self._text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()

    def take(self) -> Piece:
        text, self._text = self._text, ""
        return Piece(text)
