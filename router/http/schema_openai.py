"""Requests of OpenAI's API, and the further fields that open models' servers share. Null means unset."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.http.fields import Count, Ignored, Int32, Schema, Strict, UInt32

MAX_PROMPTS = 128


class StreamOptions(Strict):
    """`include_usage`: one more chunk, with the usage, at the end."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class StructuredOutputs(Strict):
    """What the answer must match; one of these."""

    json_: Schema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampled(Strict):
    """What both kinds of completion share."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[UInt32] | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    max_tokens: Count | None = None
    logit_bias: dict[str, float] | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int32 = 0
    timeout: float | None = None
    return_token_ids: bool | None = None

    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    user: Ignored = None
    metadata: Ignored = None


class CompletionRequest(Sampled):
    """POST /v1/completions"""

    prompt: str | list[str] | list[UInt32] | list[list[UInt32]]
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: UInt32 | None = None
    suffix: str | None = None


class FunctionCall(Strict):
    """A call as the model made it. `arguments`: a JSON object, as text or as it is."""

    name: str
    arguments: str | Schema = ""
    # What the official client adds to answers that it has parsed, and sends back with them.
    parsed_arguments: Ignored = None


class ToolCall(Strict):
    """Of an assistant's turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None


class ContentPart(Strict, extra="allow"):
    """`text` of a part with the type text or refusal; other types are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Strict):
    """One turn. `name`: not shown to the model, whose template has no place for it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Ignored = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Ignored = None
    parsed: Ignored = None
    audio: None = None
    function_call: None = None


class Function(Strict):
    """`parameters`: a JSON schema."""

    name: str
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may ask for."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The answer is a call of this tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(Strict):
    """Of a response format."""

    name: Ignored = None
    description: Ignored = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: Ignored = None


class ResponseFormat(Strict):
    """What the content must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TemplateOptions(Strict):
    """Of the checkpoint's chat template."""

    enable_thinking: bool | None = None
    clear_thinking: bool | None = None


class Thinking(Strict):
    """As Z.ai's API says it."""

    type: Literal["enabled", "disabled"] | None = None
    clear_thinking: bool | None = None


class ChatPrompt(Strict):
    """What a chat's prompt is made of."""

    model: str = ""
    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    thinking: Thinking | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ChatCompletionRequest(ChatPrompt, Sampled):
    """POST /v1/chat/completions"""

    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None

    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    prediction: Ignored = None
