"""A conversation in the words of chat templates: checked, then rendered.

A value that is wrong is an InvalidArgumentError that names its field; what the checkpoint cannot do is an
UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.errors import UnsupportedError, echo
from router.model import TextModel
from router.text.chat_template import TemplateRefusalError
from router.text.reasoning import END_THINK, THINK
from router.text.tool_prompt import with_tools
from router.tools import Tools, check_name, json_object
from router.validation import MAX_MESSAGES, check_count

_ROLES = {
    inference_pb2.ROLE_SYSTEM: "system",
    inference_pb2.ROLE_USER: "user",
    inference_pb2.ROLE_ASSISTANT: "assistant",
    inference_pb2.ROLE_TOOL: "tool",
}


@dataclass(frozen=True)
class Prompt:
    """`in_reasoning`: the answer begins within the reasoning. `after_reasoning`: the prompt has closed it."""

    text: str
    in_reasoning: bool
    after_reasoning: bool


def render(model: TextModel, request: inference_pb2.ChatRequest, tools: Tools) -> Prompt:
    """The prompt that asks for the answer."""
    if model.template is None:
        raise UnsupportedError("the served checkpoint has no chat template; use Generate")
    messages, shown = _messages(request.messages), tools.plain
    if "tools" not in model.template.variables:
        messages, shown = with_tools(messages, shown), []
    try:
        text = model.template.render(messages, shown, _options(model, request))
    except TemplateRefusalError as error:
        raise InvalidArgumentError("messages", f"the chat template refuses them: {echo(str(error))}") from None
    end = text.rstrip() if model.answers.reasoning is not None else ""
    return Prompt(text, end.endswith(THINK), end.endswith(END_THINK))


def _options(model: TextModel, request: inference_pb2.ChatRequest) -> dict[str, bool]:
    """What the client set, and nothing else: the template has defaults of its own."""
    assert model.template is not None
    # What holds where the template has no such variable.
    fixed = {"enable_thinking": model.answers.reasoning is not None, "clear_thinking": True}
    options: dict[str, bool] = {}
    for name, only in fixed.items():
        if not request.HasField(name):  # type: ignore[arg-type]
            continue
        options[name] = getattr(request, name)
        if name not in model.template.variables and options[name] != only:
            raise UnsupportedError(
                f"{name}: not an option of the checkpoint's chat template; allowed: unset or {str(only).lower()}"
            )
    return options


def _messages(messages: Sequence[inference_pb2.ChatMessage]) -> list[dict[str, Any]]:
    if not messages:
        raise InvalidArgumentError("messages", "empty; at least one message is needed")
    check_count("messages", len(messages), MAX_MESSAGES)
    call_ids: set[str] = set()
    return [_message(f"messages[{index}]", message, call_ids) for index, message in enumerate(messages)]


def _message(path: str, message: inference_pb2.ChatMessage, call_ids: set[str]) -> dict[str, Any]:
    """`call_ids`: of the tool calls so far."""
    role = _ROLES.get(message.role)
    if role is None:
        allowed = ", ".join(inference_pb2.Role.Name(each) for each in _ROLES)
        raise InvalidArgumentError(f"{path}.role", f"{message.role} is not a role; allowed: {allowed}")
    if role != "assistant":
        _refuse(f"{path}.reasoning", message.reasoning, "ROLE_ASSISTANT")
        _refuse(f"{path}.tool_calls", message.tool_calls, "ROLE_ASSISTANT")
    plain: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        own_ids: set[str] = set()
        plain["tool_calls"] = [
            _call(f"{path}.tool_calls[{index}]", call, own_ids) for index, call in enumerate(message.tool_calls)
        ]
        call_ids |= own_ids
    if role == "tool":
        if message.tool_call_id not in call_ids:
            raise InvalidArgumentError(
                f"{path}.tool_call_id", f"{echo(message.tool_call_id)!r} is not the id of an earlier tool call"
            )
        plain["tool_call_id"] = message.tool_call_id
    else:
        _refuse(f"{path}.tool_call_id", message.tool_call_id, "ROLE_TOOL")
    return plain


def _refuse(path: str, value: object, role: str) -> None:
    if value:
        raise InvalidArgumentError(path, f"set; allowed only in a message of {role}")


def _call(path: str, call: inference_pb2.ToolCall, own_ids: set[str]) -> dict[str, Any]:
    """`own_ids`: of the calls before it in the same message. Other servers begin anew in each."""
    check_name(f"{path}.name", call.name)
    if not call.id or call.id in own_ids:
        raise InvalidArgumentError(f"{path}.id", f"{echo(call.id)!r} is empty or of an earlier call; ids must differ")
    own_ids.add(call.id)
    # Templates go through the arguments by key.
    arguments = json_object(f"{path}.arguments_json", call.arguments_json) if call.arguments_json else {}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
