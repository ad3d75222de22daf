"""Pieces of the tool calls of one answer, as a parser finds them."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from glmserve.inference.v1 import inference_pb2


def new_call_id() -> str:
    """Unique among all calls of a conversation."""
    return f"call_{secrets.token_hex(12)}"


class CallSink:
    """Collects pieces; those of one call that are taken together are one."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._pieces: list[inference_pb2.ToolCallDelta] = []
        # Calls that have begun; calls that are whole.
        self.begun = 0
        self.whole = 0

    def begin(self, name: str) -> None:
        """A call of `name`."""
        self._pieces.append(inference_pb2.ToolCallDelta(index=self.begun, id=self._new_id(), name=name))
        self.begun += 1

    def add_arguments(self, text: str) -> None:
        """A piece of the JSON object of the call begun last."""
        index = self.begun - 1
        if self._pieces and self._pieces[-1].index == index:
            self._pieces[-1].arguments_json += text
        elif text:
            self._pieces.append(inference_pb2.ToolCallDelta(index=index, arguments_json=text))

    def end(self) -> None:
        """The call begun last is whole."""
        self.whole += 1

    def take(self) -> list[inference_pb2.ToolCallDelta]:
        """The pieces since this was last called."""
        pieces, self._pieces = self._pieces, []
        return pieces
