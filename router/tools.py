"""The tools of a conversation, checked: what the model may call, and how its calls are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.errors import echo
from router.text.argument_types import ArgumentTypes
from router.validation import check_count

MAX_TOOLS = 256
MAX_NAME = 128
# Of lists and objects in each other: what reads or writes JSON by recursion needs an end.
MAX_NESTING = 128
_NAME = re.compile(rf'[^\s<>"\\]{{1,{MAX_NAME}}}')


@dataclass(frozen=True)
class Tools:
    """`plain`: as of OpenAI's API, which templates expect. `types`: of the arguments of each, by its name."""

    plain: Sequence[Mapping[str, Any]]
    types: Mapping[str, ArgumentTypes]


def check_tools(request: inference_pb2.ChatRequest) -> Tools:
    """Raises InvalidArgumentError: a tool or the choice among them is wrong."""
    check_count("tools", len(request.tools), MAX_TOOLS)
    plain: list[Mapping[str, Any]] = []
    types: dict[str, ArgumentTypes] = {}
    for index, tool in enumerate(request.tools):
        path = f"tools[{index}]"
        check_name(f"{path}.name", tool.name)
        if tool.name in types:
            raise InvalidArgumentError(f"{path}.name", f"{tool.name!r} is an earlier tool's name; names must differ")
        schema = _schema(f"{path}.parameters_json_schema", tool.parameters_json_schema)
        types[tool.name] = ArgumentTypes.of_schema(schema)
        plain.append(_plain(tool, schema))
    _check_choice(request.tool_choice, types)
    return Tools(plain, types)


def check_name(path: str, name: str) -> None:
    """Of a tool."""
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            path,
            f"{echo(name)!r} is no tool's name; allowed: 1 to {MAX_NAME} characters, no space, quote, backslash, <, >",
        )


def json_object(path: str, text: str) -> dict[str, Any]:
    """The JSON object that `text` is. Raises InvalidArgumentError: it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(path, f"{echo(text)!r} is not a JSON object")
    if _nests_deeper(value, MAX_NESTING):
        raise InvalidArgumentError(path, f"lists and objects in each other deeper than {MAX_NESTING} levels")
    return value


def _nests_deeper(value: dict[str, Any], levels: int) -> bool:
    level: list[Any] = [value]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    return bool(level)


def _schema(path: str, text: str) -> dict[str, Any]:
    schema = json_object(path, text) if text else {"type": "object", "properties": {}}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidArgumentError(path, f"of type {echo(json.dumps(kind))}; allowed: the schema of an object")
    return schema


def _plain(tool: inference_pb2.Tool, schema: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": schema}}


def _check_choice(choice: inference_pb2.ToolChoice, names: Mapping[str, object]) -> None:
    if choice.WhichOneof("choice") == "name":
        if choice.name not in names:
            raise InvalidArgumentError("tool_choice.name", f"{echo(choice.name)!r} is none of the tools")
    elif choice.mode not in inference_pb2.ToolMode.values():
        raise InvalidArgumentError(
            "tool_choice.mode",
            f"{choice.mode} is not a mode; allowed: TOOL_MODE_AUTO, TOOL_MODE_NONE, TOOL_MODE_REQUIRED",
        )
    elif choice.mode == inference_pb2.TOOL_MODE_REQUIRED and not names:
        raise InvalidArgumentError("tool_choice.mode", "TOOL_MODE_REQUIRED without tools; give at least one")
