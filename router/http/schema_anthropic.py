"""Requests of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.http.fields import Count, Ignored, Int32, Schema, Strict, UInt32


class Block(Strict, extra="allow"):
    """A piece of content: text, thinking, tool_use or tool_result; other types are refused. `content`: of a result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Schema | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class TextBlock(Strict):
    """Of a system prompt."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class Message(Strict):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Strict):
    """A tool of the client's own; those that Anthropic runs have other types, and are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: Literal[False] | None = None
    input_examples: Ignored = None
    allowed_callers: Ignored = None


class ToolChoice(Strict):
    """`any`: the answer is at least one call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """`budget_tokens` is not counted: max_tokens is the limit of reasoning and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(Strict):
    """What the text must be."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Strict):
    """`effort` is advice, which the model has no ear for."""

    effort: Ignored = None
    format: OutputFormat | None = None


class MessagePrompt(Strict):
    """What the prompt is made of. POST /v1/messages/count_tokens"""

    model: str = ""
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Ignored = None
    context_management: Ignored = None


class MessageRequest(MessagePrompt):
    """POST /v1/messages"""

    max_tokens: Count
    temperature: float | None = None
    top_p: float | None = None
    top_k: UInt32 | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    priority: Int32 = 0
    timeout: Annotated[float, Field(gt=0)] | None = None

    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    diagnostics: Ignored = None
