"""Parts that OpenAI's responses share: the envelope, usage, finish reasons, log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glmserve.inference.v1 import inference_pb2

FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is around every response and every chunk of one request."""

    kind: str
    prefix: str
    model: inference_pb2.GetModelResponse
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, request_id: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        """The whole object."""
        return {
            "id": self.prefix + request_id,
            "object": self.kind,
            "created": self.created,
            "model": self.model.name,
            # A revision is a hash: its beginning, because every chunk has it.
            "system_fingerprint": f"fp_{self.model.revision[:12]}" if self.model.revision else None,
            "choices": choices,
            **more,
        }


class UsageSum:
    """Usage of all choices of all prompts. The choices of one prompt share it: it counts once."""

    def __init__(self) -> None:
        self._prompts: dict[int, inference_pb2.Usage] = {}
        self._completion_tokens = 0
        self._reasoning_tokens = 0

    def add(self, prompt: int, usage: inference_pb2.Usage) -> None:
        """Count a choice's usage."""
        self._prompts.setdefault(prompt, usage)
        self._completion_tokens += usage.completion_tokens
        self._reasoning_tokens += usage.reasoning_tokens

    @property
    def json(self) -> dict[str, Any]:
        """As OpenAI says it."""
        prompt_tokens = sum(usage.prompt_tokens for usage in self._prompts.values())
        cached = sum(usage.cached_prompt_tokens for usage in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
        }


def chat_logprobs(logprobs: Iterable[inference_pb2.TokenLogprob]) -> dict[str, Any]:
    """Of a chat completion."""
    content = [{**_token(entry), "top_logprobs": [_token(top) for top in entry.top]} for entry in logprobs]
    return {"content": content, "refusal": None}


def _token(entry: inference_pb2.TokenLogprob | inference_pb2.TopLogprob) -> dict[str, Any]:
    text = entry.token.decode(errors="replace")
    return {"token": text, "logprob": entry.logprob, "bytes": list(entry.token)}


def token_text(token: bytes) -> str:
    """A token where only text can stand; bytes that are part of a character are spelled, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
