"""A chat's messages as the events of Anthropic's stream: blocks that begin, grow and end one after another."""

from __future__ import annotations

from typing import Any

from glmserve.inference.v1 import inference_pb2
from router.http.message_parts import message_id, signature, stop_of, usage_json
from router.http.sse import named_event


class MessageEvents:
    """One message. At any time at most one block is open: thinking, text, or a call."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._request_id = ""
        self._index = -1
        # Kind of the open block, and of a call its index.
        self._open: tuple[str, int] | None = None
        self._events: list[bytes] = []

    def of(self, response: inference_pb2.ChatResponse) -> bytes:
        """The events of one message of ours."""
        if not self._request_id:
            self._request_id = response.request_id
            self._begin(len(response.prompt_ids))
        if response.reasoning:
            self._grow(("thinking", 0), {"thinking": ""}, "thinking_delta", {"thinking": response.reasoning})
        if response.content:
            self._grow(("text", 0), {"text": ""}, "text_delta", {"text": response.content})
        for call in response.tool_calls:
            start = {"id": call.id, "name": call.name, "input": {}}
            delta = {"partial_json": call.arguments_json}
            self._grow(("tool_use", call.index), start, "input_json_delta", delta)
        if response.HasField("finish"):
            self._end(response.finish)
        events, self._events = self._events, []
        return b"".join(events)

    def _add(self, name: str, **data: Any) -> None:
        self._events.append(named_event(name, {"type": name, **data}))

    def _begin(self, prompt_tokens: int) -> None:
        message: dict[str, Any] = {
            "id": message_id(self._request_id),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # What of it comes out of the cache is known at the end.
            "usage": usage_json(inference_pb2.Usage(prompt_tokens=prompt_tokens)),
        }
        self._add("message_start", message=message)

    def _grow(self, block: tuple[str, int], start: dict[str, Any], kind: str, delta: dict[str, Any]) -> None:
        if self._open != block:
            self._close()
            self._index += 1
            self._open = block
            if block[0] == "thinking":
                start = {**start, "signature": ""}
            self._add("content_block_start", index=self._index, content_block={"type": block[0], **start})
        self._add("content_block_delta", index=self._index, delta={"type": kind, **delta})

    def _close(self) -> None:
        if self._open is None:
            return
        if self._open[0] == "thinking":
            delta = {"type": "signature_delta", "signature": signature(self._request_id)}
            self._add("content_block_delta", index=self._index, delta=delta)
        self._add("content_block_stop", index=self._index)
        self._open = None

    def _end(self, finish: inference_pb2.Finish) -> None:
        self._close()
        self._add("message_delta", delta=stop_of(finish), usage=usage_json(finish.usage))
        self._add("message_stop")
