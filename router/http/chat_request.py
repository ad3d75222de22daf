"""OpenAI's chat request in our terms."""

from __future__ import annotations

from collections.abc import Sequence

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.errors import echo
from router.http.errors import Names
from router.http.fields import json_text
from router.http.openai_sampling import SAMPLING_NAMES, any_object, output_constraint, sampling_options
from router.http.schema_openai import (
    ChatCompletionRequest,
    ChatPrompt,
    ContentPart,
    Message,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
)

_ROLES = {
    "system": inference_pb2.ROLE_SYSTEM,
    "developer": inference_pb2.ROLE_SYSTEM,
    "user": inference_pb2.ROLE_USER,
    "assistant": inference_pb2.ROLE_ASSISTANT,
    "tool": inference_pb2.ROLE_TOOL,
}
_MODES = {
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "none": inference_pb2.TOOL_MODE_NONE,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}
_NAMES = (
    *SAMPLING_NAMES,
    (".parameters_json_schema", ".function.parameters"),
    (".arguments_json", ".function.arguments"),
    ("enable_thinking", "chat_template_kwargs.enable_thinking"),
    ("clear_thinking", "chat_template_kwargs.clear_thinking"),
)


def chat_request(body: ChatCompletionRequest) -> tuple[inference_pb2.ChatRequest, Names]:
    """The request, and what its client calls our fields. Raises InvalidArgumentError."""
    request = chat_prompt(body)
    request.sampling.CopyFrom(sampling_options(body))
    request.priority = body.priority
    names = list(_NAMES)
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise InvalidArgumentError("max_tokens", "cannot be given together with max_completion_tokens")
        request.sampling.max_tokens = body.max_completion_tokens
        names.insert(0, ("sampling.max_tokens", "max_completion_tokens"))
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgumentError("top_logprobs", "needs logprobs: true")
    if body.logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
        names.insert(0, ("sampling.logprobs", "top_logprobs"))
    if body.parallel_tool_calls is not None:
        request.parallel_tool_calls = body.parallel_tool_calls
    constraint = output_constraint(body, _response_format(body.response_format))
    if constraint is not None:
        field, meaning = constraint
        request.constraint.CopyFrom(meaning)
        names = [(f"constraint.{meaning.WhichOneof('kind')}", field), ("constraint", field), *names]
    request.return_prompt_ids = bool(body.return_token_ids)
    return request, Names(tuple(names))


def chat_prompt(body: ChatPrompt) -> inference_pb2.ChatRequest:
    """What the prompt is made of. Raises InvalidArgumentError."""
    request = inference_pb2.ChatRequest(
        model=body.model,
        messages=[_message(f"messages[{index}]", message) for index, message in enumerate(body.messages)],
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())],
    )
    if isinstance(body.tool_choice, NamedTool):
        request.tool_choice.name = body.tool_choice.function.name
    elif body.tool_choice is not None:
        request.tool_choice.mode = _MODES[body.tool_choice]
    _set_thinking(request, body)
    return request


def _set_thinking(request: inference_pb2.ChatRequest, body: ChatPrompt) -> None:
    """Three ways to say the same: Z.ai's, OpenAI's, and the template's own."""
    enabled: dict[str, bool] = {}
    cleared: dict[str, bool] = {}
    if body.thinking is not None:
        if body.thinking.type is not None:
            enabled["thinking.type"] = body.thinking.type == "enabled"
        if body.thinking.clear_thinking is not None:
            cleared["thinking.clear_thinking"] = body.thinking.clear_thinking
    if body.reasoning_effort == "none":
        enabled["reasoning_effort"] = False
    if body.chat_template_kwargs is not None:
        options = body.chat_template_kwargs
        if options.enable_thinking is not None:
            enabled["chat_template_kwargs.enable_thinking"] = options.enable_thinking
        if options.clear_thinking is not None:
            cleared["chat_template_kwargs.clear_thinking"] = options.clear_thinking
    for given in (enabled, cleared):
        if len(set(given.values())) > 1:
            first, second = list(given)[:2]
            raise InvalidArgumentError(second, f"says the opposite of {first}")
    if enabled:
        request.enable_thinking = next(iter(enabled.values()))
    if cleared:
        request.clear_thinking = next(iter(cleared.values()))


def _message(field: str, message: Message) -> inference_pb2.ChatMessage:
    content = _text(f"{field}.content", message.content)
    if message.role != "assistant":
        if message.content is None:
            raise InvalidArgumentError(f"{field}.content", f"missing; a message of role {message.role} needs it")
        for name in ("tool_calls", "reasoning_content", "refusal"):
            if getattr(message, name):
                raise InvalidArgumentError(
                    f"{field}.{name}", f"not allowed for role {message.role}; allowed: assistant"
                )
    return inference_pb2.ChatMessage(
        role=_ROLES[message.role],
        content=content or message.refusal or "",
        reasoning=message.reasoning_content or "",
        tool_calls=[
            _tool_call(f"{field}.tool_calls[{index}]", call) for index, call in enumerate(message.tool_calls or ())
        ],
        tool_call_id=message.tool_call_id or "",
    )


def _text(field: str, content: str | Sequence[ContentPart] | None) -> str:
    """Parts are joined as the checkpoint's own template joins them: without anything between."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            allowed = "only text is served" if part.type != "text" else "it has no text"
            raise InvalidArgumentError(f"{field}[{index}].type", f"{echo(part.type)!r} is not allowed; {allowed}")
        texts.append(text)
    return "".join(texts)


def _tool_call(field: str, call: ToolCall) -> inference_pb2.ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json_text(f"{field}.function.arguments", arguments)
    return inference_pb2.ToolCall(id=call.id, name=call.function.name, arguments_json=text or "{}")


def _tool(field: str, tool: Tool) -> inference_pb2.Tool:
    function = tool.function
    return inference_pb2.Tool(
        name=function.name,
        description=function.description or "",
        parameters_json_schema=json_text(f"{field}.function.parameters", function.parameters)
        if function.parameters
        else "",
        strict=bool(function.strict),
    )


def _response_format(wanted: ResponseFormat | None) -> inference_pb2.OutputConstraint | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return any_object()
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidArgumentError("response_format.json_schema.schema", "missing; type json_schema needs it")
    schema = json_text("response_format.json_schema.schema", wanted.json_schema.schema_)
    return inference_pb2.OutputConstraint(json_schema=schema)
