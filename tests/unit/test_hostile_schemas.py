"""Schemas of tools that are made to cost much, or that no grammar can be made of: refused, and at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.constraints import tool_call_constraint
from router.text.tool_calls import ToolStyle, ToolSyntax
from router.tools import MAX_NESTING, check_tools
from tests.unit.constraint_tokens import TAG_IDS

# What takes longer than this by itself would take years.
pytestmark = pytest.mark.timeout(20)
GLM = ToolStyle(ToolSyntax.GLM_COMPACT, TAG_IDS)


def references(width: int, depth: int) -> dict[str, Any]:
    """A string, to which width ** depth ways lead."""
    parts: dict[str, Any] = {
        f"a{level}": {"anyOf": [{"$ref": f"#/$defs/a{level + 1}"}] * width} for level in range(depth)
    }
    parts[f"a{depth}"] = {"type": "string"}
    return {"type": "object", "properties": {"p": {"$ref": "#/$defs/a0"}}, "$defs": parts}


def circle(width: int) -> dict[str, Any]:
    """An argument that is one of `width` times itself."""
    part = {"anyOf": [{"$ref": "#/$defs/a"}] * width}
    return {"type": "object", "properties": {"p": {"$ref": "#/$defs/a"}}, "$defs": {"a": part}}


def argument(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": schema}}


def request(schema: dict[str, Any] | str) -> inference_pb2.ChatRequest:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return inference_pb2.ChatRequest(
        tools=[inference_pb2.Tool(name="f", parameters_json_schema=text)],
        tool_choice=inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_REQUIRED),
    )


async def constrain(schema: dict[str, Any]) -> str:
    asked = request(schema)
    made = await tool_call_constraint(asked.tools, asked.tool_choice, parallel=True, style=GLM)
    assert made is not None
    return made.lark


@pytest.mark.parametrize("schema", [references(32, 7), circle(32)], ids=["many ways", "circle"])
def test_types_are_found_although_the_ways_are_too_many_to_go(schema: dict[str, Any]) -> None:
    types = check_tools(request(schema)).types["f"].of("p")
    assert "string" in types


def test_a_string_behind_references_is_a_string() -> None:
    assert check_tools(request(references(3, 3))).types["f"].of("p") == {"string"}


@pytest.mark.parametrize("schema", [references(32, 7), circle(32)], ids=["many ways", "circle"])
async def test_more_forms_than_a_grammar_should_have_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\]\.parameters_json_schema: .*more than 1024 forms"):
        await constrain(schema)


async def test_a_few_ways_are_gone() -> None:
    assert (await constrain(references(3, 3))).count("V0_") == 2 * 3**3  # a terminal a form: named, and used


@pytest.mark.parametrize("length", ["x", -1, 1.5, True, [], {}], ids=str)
async def test_lengths_that_are_none_are_refused(length: object) -> None:
    # An empty list of types: what then stands beside it is not looked at before it comes to us.
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\]\.parameters_json_schema: "):
        await constrain(argument(type=[], minLength=length))


@pytest.mark.parametrize(
    "pattern", ["[" * 30_000, "[" * 30_000 + "\\", "(" * 30_000], ids=["classes", "escape", "groups"]
)
async def test_patterns_cost_no_more_than_their_length(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\]\.parameters_json_schema: "):
        await constrain(argument(type=[], pattern=pattern))


@pytest.mark.parametrize("levels", [MAX_NESTING - 2, MAX_NESTING - 1, 970, 975, 976, 977, 978, 979, 980, 5000])
def test_nesting_has_an_end(levels: int) -> None:
    text = f'{{"type": "object", "properties": {"[" * (levels - 1)}{"]" * (levels - 1)}}}'
    if levels < MAX_NESTING:
        assert check_tools(request(text)).plain
        return
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\]\.parameters_json_schema: (lists and objects|not JSON)"):
        check_tools(request(text))
