"""Constraints as the router checks them, and grammars of tool calls against what they must and must not let through."""

import asyncio
import itertools
import json
import re
from typing import Any

import pytest

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.constraints import (
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    check_constraint,
    engine_constraint,
    tool_call_constraint,
)
from router.errors import UnsupportedError
from router.text.tool_calls import ToolStyle, ToolSyntax
from tests.unit.constraint_tokens import TAG_IDS, verdict

Output = inference_pb2.OutputConstraint
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["C", "F", None]},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "$defs": {
        "place": {"anyOf": [{"type": "string", "pattern": "^[A-Z/]+$"}, {"type": "array", "items": {"type": "number"}}]}
    },
}
COMPACT = ToolStyle(ToolSyntax.GLM_COMPACT, TAG_IDS)
SPELLED = ToolStyle(ToolSyntax.GLM_COMPACT, {})
LINES = ToolStyle(ToolSyntax.GLM_LINES, TAG_IDS)
JSON = ToolStyle(ToolSyntax.JSON_LINE, TAG_IDS)
REQUIRED = inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_REQUIRED)
AUTO = inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_AUTO)


def chosen(*texts: str) -> Output:
    return Output(choices=inference_pb2.Choices(texts=texts))


def tool(name: str, schema: Any = None, *, strict: bool = False) -> inference_pb2.Tool:
    return inference_pb2.Tool(
        name=name, parameters_json_schema="" if schema is None else json.dumps(schema), strict=strict
    )


def glm(name: str, *arguments: tuple[str, str]) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments)
    return f"<tool_call>{name}{pairs}</tool_call>"


def glm_lines(name: str, *arguments: tuple[str, str]) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments)
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def build(
    tools: list[inference_pb2.Tool],
    choice: inference_pb2.ToolChoice = REQUIRED,
    *,
    style: ToolStyle = COMPACT,
    parallel: bool = True,
) -> engine_pb2.Constraint:
    made = asyncio.run(tool_call_constraint(tools, choice, parallel=parallel, style=style))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("constraint", "field", "says"),
    [
        (Output(), "constraint", "empty; allowed: json_schema, regex, grammar or choices"),
        (Output(json_schema='{"type": "objec"}'), "constraint.json_schema", "Invalid type: objec"),
        (Output(json_schema='{"type": '), "constraint.json_schema", "line 1 column"),
        (Output(json_schema=""), "constraint.json_schema", "0 bytes long; allowed: 1 to 65536 bytes"),
        (Output(json_schema='{"format": "spam"}'), "constraint.json_schema", "Unknown format: spam"),
        (
            Output(json_schema='{"properties": {"a": false}, "required": ["a"], "type": "object"}'),
            "constraint.json_schema",
            "Unsatisfiable schema",
        ),
        (Output(regex="[a"), "constraint.regex", "unclosed character class"),
        (Output(regex="a" * (MAX_CONSTRAINT_BYTES + 1)), "constraint.regex", "65537 bytes long"),
        (Output(grammar="start: foo"), "constraint.grammar", 'unknown name: "foo"'),
        (Output(grammar="start: " + "(" * 5000), "constraint.grammar", "too deeply nested"),
        (Output(choices=inference_pb2.Choices()), "constraint.choices", "0 texts; allowed: 1 to 1024"),
        (chosen("a", ""), "constraint.choices.texts[1]", "empty"),
        (chosen(*["a"] * (MAX_CHOICES + 1)), "constraint.choices", "1025 texts"),
    ],
)
async def test_a_wrong_constraint_is_named(constraint: Output, field: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(says)) as caught:
        await check_constraint("constraint", constraint)
    assert caught.value.field == field


async def test_a_long_chain_of_rules_does_not_overflow_the_stack() -> None:
    names = [f"r{i}" for i in range(5000)]
    rules = "\n".join(f"{a}: {b}" for a, b in itertools.pairwise(names))
    await check_constraint("constraint", Output(grammar=f'start: r0\n{rules}\nr4999: "a"'))


@pytest.mark.parametrize("texts", [["yes", "no", "yes!"], ["a.b*", "日本\n", '"\\/ \x00\x7f']])
async def test_choices_are_exactly_the_texts(texts: list[str]) -> None:
    constraint = chosen(*texts)
    await check_constraint("constraint", constraint)
    made = engine_constraint(constraint, 7)
    assert made.begin_after_token_id == 7
    assert [verdict(made, text) for text in texts] == ["whole"] * len(texts)
    assert verdict(made, "nope") == verdict(made, texts[0] + "?") == "refused"


def test_schema_regex_and_grammar_are_passed_on() -> None:
    assert engine_constraint(Output(json_schema="{}"), None) == engine_pb2.Constraint(json_schema="{}")
    assert engine_constraint(Output(regex="a"), None) == engine_pb2.Constraint(regex="a")
    assert engine_constraint(Output(grammar="start: /a/"), 3) == engine_pb2.Constraint(
        lark="start: /a/", begin_after_token_id=3
    )


@pytest.mark.parametrize("style", [COMPACT, SPELLED])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([("city", " New\nYork <b> é "), ("days", "12")], "whole"),
        ([("city", ""), ("days", "1"), ("unit", "F"), ("at", "A/B")], "whole"),
        ([("city", "x"), ("days", "1"), ("unit", "null"), ("at", "[1, 2.5]")], "whole"),
        ([("city", "x")], "refused"),  # days is required
        ([("city", "x"), ("days", "0")], "refused"),
        ([("city", "x"), ("days", '"1"')], "refused"),
        ([("days", "1"), ("city", "x")], "refused"),  # the schema's order
        ([("city", "x"), ("days", "1"), ("unit", "K")], "refused"),
        ([("city", "x"), ("days", "1"), ("at", "ab")], "refused"),
        ([("city", "x"), ("days", "1"), ("more", "1")], "refused"),
    ],
)
def test_glm_arguments_follow_the_schema(style: ToolStyle, arguments: list[tuple[str, str]], expected: str) -> None:
    constraint = build([tool("get_weather", WEATHER)], style=style)
    assert verdict(constraint, glm("get_weather", *arguments), spelled=not style.tag_ids) == expected


def test_a_string_never_spells_the_closing_tag() -> None:
    constraint = build([tool("f", {"properties": {"a": {"type": "string"}}, "required": ["a"], "type": "object"})])
    start = "<tool_call>f<arg_key>a</arg_key><arg_value>"
    assert verdict(constraint, f"{start}</arg_value></tool_call>") == "whole"
    assert verdict(constraint, f"{start}</arg_valu") == "part"
    assert verdict(constraint, f"{start}</tool_call") == "part"


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("b+", "abc", "ac"),
        ("^a|b$", "axx", "ba"),
        ("^(a|b)$", "b", "bb"),
        (r"^\d{2}/[|)]\$$", "12/|$", "12/a$"),
        ("日", "x日y", "本"),
    ],
)
def test_patterns_of_strings(pattern: str, good: str, bad: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    constraint = build([tool("f", schema)])
    assert verdict(constraint, glm("f", ("a", good))) == "whole"
    assert verdict(constraint, glm("f", ("a", bad))) == "refused"


@pytest.mark.parametrize("style", [COMPACT, SPELLED])
def test_calls_in_a_row(style: ToolStyle) -> None:
    tools = [tool("get"), tool("get_all", {"type": "object", "properties": {}})]
    spelled = not style.tag_ids
    twice = glm("get") + glm("get_all")
    assert verdict(build(tools, style=style), glm("get"), spelled=spelled) == "whole"
    assert verdict(build(tools, style=style), twice, spelled=spelled) == "whole"
    assert verdict(build(tools, style=style, parallel=False), twice, spelled=spelled) == "refused"
    named = inference_pb2.ToolChoice(name="get")
    assert verdict(build(tools, named, style=style), glm("get"), spelled=spelled) == "whole"
    assert verdict(build(tools, named, style=style), glm("get_all"), spelled=spelled) == "refused"
    assert verdict(build(tools, style=style), "No.", spelled=spelled) == "refused"


def test_lines() -> None:
    constraint = build([tool("get_weather", WEATHER), tool("now")], style=LINES)
    call = glm_lines("get_weather", ("city", "x"), ("days", "1"))
    assert verdict(constraint, f"\n{call}\n{glm_lines('now')}") == "whole"
    assert verdict(constraint, glm("get_weather", ("city", "x"), ("days", "1"))) == "refused"


def test_json_line() -> None:
    constraint = build([tool("get_weather", WEATHER)], style=JSON)
    good = {"name": "get_weather", "arguments": {"city": "x", "days": 1, "at": "A"}}
    assert verdict(constraint, f"<tool_call>\n{json.dumps(good)}\n</tool_call>") == "whole"
    assert verdict(constraint, f"<tool_call>{json.dumps(good | {'name': 'other'})}</tool_call>") == "refused"
    assert verdict(constraint, f"<tool_call>{json.dumps(good | {'arguments': {'city': 1}})}</tool_call>") == "refused"


@pytest.mark.parametrize("style", [COMPACT, SPELLED])
def test_left_to_the_model_only_strict_tools_are_held_to_their_schema(style: ToolStyle) -> None:
    spelled = not style.tag_ids
    constraint = build([tool("get_weather", WEATHER, strict=True), tool("free", WEATHER)], AUTO, style=style)
    assert verdict(constraint, "Hello, <b>you</b>!", spelled=spelled) == "whole"
    assert verdict(constraint, "", spelled=spelled) == "whole"
    good = glm("get_weather", ("city", "x"), ("days", "1"))
    assert verdict(constraint, f"I look.\n{good}{glm('free', ('what', 'ever'))}", spelled=spelled) == "whole"
    assert verdict(constraint, glm("get_weather", ("city", "x")), spelled=spelled) == "refused"


async def test_nothing_is_constrained_where_any_text_will_do() -> None:
    none = inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_NONE)
    free, strict = [tool("f")], [tool("f", strict=True)]
    for tools, choice in ((free, AUTO), (free, inference_pb2.ToolChoice()), ([], AUTO), (strict, none)):
        assert await tool_call_constraint(tools, choice, parallel=True, style=COMPACT) is None
    assert await tool_call_constraint(free, AUTO, parallel=False, style=COMPACT) is not None


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([tool("a"), tool("f", {"type": "objec"})], REQUIRED, "tools[1].parameters_json_schema"),
        ([inference_pb2.Tool(name="f", parameters_json_schema="[]")], REQUIRED, "tools[0].parameters_json_schema"),
        ([inference_pb2.Tool(name="f", parameters_json_schema="true")], REQUIRED, "tools[0].parameters_json_schema"),
        ([tool("f")], inference_pb2.ToolChoice(name="g"), "tool_choice"),
        ([], REQUIRED, "tool_choice"),
    ],
)
async def test_wrong_tools_are_named(
    tools: list[inference_pb2.Tool], choice: inference_pb2.ToolChoice, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await tool_call_constraint(tools, choice, parallel=True, style=COMPACT)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        (Output(json_schema='{"type": "object", "required": ["a"]}'), '{"a": 1}', '{"b": 1}'),
        (Output(json_schema="true"), "[1]", "one"),
        (Output(regex="a/b+|x"), "a/bb", "a/b x"),
        (chosen("yes", "n.o"), "n.o", "nno"),
    ],
)
@pytest.mark.parametrize("style", [COMPACT, SPELLED])
def test_constrained_content_or_calls(style: ToolStyle, content: Output, good: str, bad: str) -> None:
    tools, wanted = [tool("now"), tool("weather", WEATHER)], engine_constraint(content, None)
    made = asyncio.run(tool_call_constraint(tools, AUTO, parallel=True, style=style, content=wanted))
    assert made is not None
    call = glm("weather", ("city", "Paris"), ("days", "x"))
    spelled = style is SPELLED
    for text, expected in ((good, "whole"), (call, "whole"), (call + call, "whole"), (f"{good[:1]} {call}", "refused")):
        assert verdict(made, text, spelled=spelled) == expected, text
    assert verdict(made, bad, spelled=spelled) != "whole"


def test_a_grammar_is_not_combined_with_calls() -> None:
    content = engine_pb2.Constraint(lark="start: /a/")
    with pytest.raises(UnsupportedError, match=r"^constraint.grammar: "):
        asyncio.run(tool_call_constraint([tool("now")], AUTO, parallel=True, style=COMPACT, content=content))


def test_forced_calls_are_the_whole_answer_whatever_its_content_would_be() -> None:
    content = engine_pb2.Constraint(json_schema="{}")
    tools = [tool("now")]
    made = asyncio.run(tool_call_constraint(tools, REQUIRED, parallel=True, style=COMPACT, content=content))
    assert made == build(tools)
