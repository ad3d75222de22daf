"""Requests about tokens, as vLLM has them."""

from __future__ import annotations

from pydantic import Field

from router.http.fields import Strict, UInt32
from router.http.schema_openai import ChatPrompt, Message


class TokenizeBody(ChatPrompt):
    """POST /tokenize: of `prompt`, or of what a chat with these messages and tools would be asked."""

    messages: list[Message] = Field(default_factory=list)
    prompt: str | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Strict):
    """POST /detokenize"""

    model: str = ""
    tokens: list[UInt32]
    skip_special_tokens: bool = False
