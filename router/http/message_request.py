"""Anthropic's message request in our terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.errors import echo
from router.http.errors import Names
from router.http.fields import json_text, set_given
from router.http.schema_anthropic import Block, Message, MessagePrompt, MessageRequest, Tool, ToolChoice

_PIECES = (
    ("sampling.stop", "stop_sequences"),
    ("sampling.", ""),
    (".parameters_json_schema", ".input_schema"),
    ("constraint.json_schema", "output_config.format.schema"),
    ("enable_thinking", "thinking.type"),
)
_ROLES = {
    "user": inference_pb2.ROLE_USER,
    "assistant": inference_pb2.ROLE_ASSISTANT,
    "system": inference_pb2.ROLE_SYSTEM,
}
_MODES = {
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "any": inference_pb2.TOOL_MODE_REQUIRED,
    "none": inference_pb2.TOOL_MODE_NONE,
}


def message_request(body: MessageRequest) -> tuple[inference_pb2.ChatRequest, Names]:
    """The request, and what its client calls our fields. Raises InvalidArgumentError."""
    request, names = message_prompt(body)
    request.priority = body.priority
    request.sampling.max_tokens = body.max_tokens
    request.sampling.stop.extend(body.stop_sequences or ())
    set_given(request.sampling, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k)
    # For the count of the prompt's tokens, which this API tells before the first piece of the answer.
    request.return_prompt_ids = True
    return request, names


def message_prompt(body: MessagePrompt) -> tuple[inference_pb2.ChatRequest, Names]:
    """What the prompt is made of, and what its client calls our fields. Raises InvalidArgumentError."""
    request = inference_pb2.ChatRequest(
        model=body.model, tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())]
    )
    turns: list[str] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        request.messages.add(role=inference_pb2.ROLE_SYSTEM, content=system)
        turns.append("system")
    for index, message in enumerate(body.messages):
        field = f"messages[{index}]"
        request.messages.extend(_messages(field, message))
        turns.extend([field] * (len(request.messages) - len(turns)))
    if body.tool_choice is not None:
        _set_tool_choice(request, body.tool_choice)
    # As in this API itself: the model thinks if it is told to. Adaptive: it decides, as it does by itself.
    kind = "disabled" if body.thinking is None else body.thinking.type
    if kind != "adaptive":
        request.enable_thinking = kind == "enabled"
    if body.output_config is not None and body.output_config.format is not None:
        request.constraint.json_schema = json_text("output_config.format.schema", body.output_config.format.schema_)
    return request, Names(_PIECES, turns)


def _tool(field: str, tool: Tool) -> inference_pb2.Tool:
    schema = json_text(f"{field}.input_schema", tool.input_schema)
    return inference_pb2.Tool(
        name=tool.name,
        description=tool.description or "",
        parameters_json_schema=schema,
        strict=bool(tool.strict),
    )


def _set_tool_choice(request: inference_pb2.ChatRequest, choice: ToolChoice) -> None:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidArgumentError("tool_choice.name", "missing; type tool needs it")
        request.tool_choice.name = choice.name
    else:
        request.tool_choice.mode = _MODES[choice.type]
    if choice.disable_parallel_tool_use is not None:
        request.parallel_tool_calls = not choice.disable_parallel_tool_use


def _messages(field: str, message: Message) -> Iterator[inference_pb2.ChatMessage]:
    """One turn of this API is several of ours where it has tool results: they come in their order, each alone."""
    turn = inference_pb2.ChatMessage(role=_ROLES[message.role])
    if isinstance(message.content, str):
        turn.content = message.content
        yield turn
        return
    texts: list[str] = []
    for index, block in enumerate(message.content):
        path = f"{field}.content[{index}]"
        match message.role, block.type:
            case _, "text":
                texts.append(_needed(path, "text", block.text))
            case "assistant", "thinking":
                turn.reasoning += _needed(path, "thinking", block.thinking)
            case "assistant", "tool_use":
                arguments = json_text(f"{path}.input", block.input or {})
                turn.tool_calls.add(id=block.id or "", name=_needed(path, "name", block.name), arguments_json=arguments)
            case "user", "tool_result":
                if texts:
                    yield inference_pb2.ChatMessage(role=turn.role, content="\n".join(texts))
                    texts = []
                yield _tool_result(path, block)
            case _:
                raise _refused(path, block, message.role)
    turn.content = "\n".join(texts)
    if turn.content or message.role == "assistant" or not message.content:
        yield turn


def _tool_result(field: str, block: Block) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(
        role=inference_pb2.ROLE_TOOL,
        content=_result_text(f"{field}.content", block.content),
        tool_call_id=_needed(field, "tool_use_id", block.tool_use_id),
    )


def _result_text(field: str, content: str | Sequence[Block] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise _refused(f"{field}[{index}]", block, "tool_result")
        texts.append(_needed(f"{field}[{index}]", "text", block.text))
    return "\n".join(texts)


def _needed(field: str, name: str, value: str | None) -> str:
    if value is None:
        raise InvalidArgumentError(f"{field}.{name}", "missing; it is required")
    return value


def _refused(field: str, block: Block, where: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{field}.type",
        f"{echo(block.type)!r} is not allowed in a turn of {where}; allowed: text, of an assistant also thinking and "
        "tool_use, of a user tool_result",
    )
