"""Conversations: rendered as transformers renders them, and refused by field."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.conversation import render
from router.errors import UnsupportedError
from router.model import TextModel
from router.text.tool_calls import ToolSyntax
from router.tools import check_tools
from tests.unit.glm_templates import GLM_COMPACT, GLM_LINES, HERMES, glm_model, glm_raw_tokenizer
from tests.unit.router_harness import TEMPLATE

ROLES = {name.removeprefix("ROLE_").lower(): number for name, number in inference_pb2.Role.items()}
WEATHER = {
    "name": "weather",
    "description": "Of a city, <now>.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {**WEATHER, "name": "now"}}]


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Be brief."}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "  Hi \n"}],
    "system": [SYSTEM, {"role": "user", "content": "你好 <b>&amp;</b> {{ x }} 🙂"}],
    "turns": [
        SYSTEM,
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": " Because. ", "reasoning_content": "\nhm\n"},
        {"role": "user", "content": "And?"},
    ],
    "calls": [
        {"role": "user", "content": "Weather in Paris and 東京?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "two calls",
            "tool_calls": [
                call(1, "weather", city="Paris", days=2),
                call(2, "weather", city=' "東京"\n', more={"a": [1, None, True]}),
                call(3, "now"),
            ],
        },
        {"role": "tool", "content": "12 °C", "tool_call_id": "call_1"},
        {"role": "tool", "content": '{"t": 20}', "tool_call_id": "call_2"},
        {"role": "tool", "content": "", "tool_call_id": "call_3"},
        {"role": "assistant", "content": "", "tool_calls": [call(4, "weather", city="Rome")]},
        {"role": "tool", "content": "15", "tool_call_id": "call_4"},
    ],
}
_NAMES = ("enable_thinking", "clear_thinking")
OPTIONS = [
    {name: value for name, value in zip(_NAMES, values, strict=True) if value is not None}
    for values in itertools.product((None, True, False), repeat=2)
]


def chat_request(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), **options: Any
) -> inference_pb2.ChatRequest:
    """OpenAI's form of a conversation as a request."""
    request = inference_pb2.ChatRequest(**options)
    for message in messages:
        added = request.messages.add(
            role=ROLES[message["role"]],
            content=message["content"],
            reasoning=message.get("reasoning_content", ""),
            tool_call_id=message.get("tool_call_id", ""),
        )
        for each in message.get("tool_calls", ()):
            function = each["function"]
            arguments = json.dumps(function["arguments"]) if function["arguments"] else ""
            added.tool_calls.add(id=each["id"], name=function["name"], arguments_json=arguments)
    for tool in tools:
        function = tool["function"]
        request.tools.add(
            name=function["name"],
            description=function["description"],
            parameters_json_schema=json.dumps(function["parameters"]),
        )
    return request


def rendered(model: TextModel, request: inference_pb2.ChatRequest) -> str:
    return render(model, request, check_tools(request)).text


@pytest.fixture(scope="module", params=["compact", "lines", "hermes"])
def template(request: pytest.FixtureRequest) -> str:
    return {"compact": GLM_COMPACT, "lines": GLM_LINES, "hermes": HERMES}[request.param]


@pytest.fixture(scope="module")
def reference(template: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' tokeniser with the template."""
    directory: Path = tmp_path_factory.mktemp("model")
    glm_raw_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("history", HISTORIES)
def test_rendering_equals_apply_chat_template(reference: Any, template: str, history: str, with_tools: bool) -> None:
    model, messages, tools = glm_model(template), HISTORIES[history], TOOLS if with_tools else []
    seen = set()
    assert model.template is not None
    for options in OPTIONS:
        if options.keys() <= model.template.variables:
            expected = reference.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **options
            )
            seen.add(expected)
            assert rendered(model, chat_request(messages, tools, **options)) == expected
    assert len(seen) == {GLM_COMPACT: 4 if history == "turns" else 2, GLM_LINES: 2, HERMES: 1}[template]


def test_what_the_client_does_not_set_is_not_told_to_the_template() -> None:
    template = "{{ enable_thinking is defined }} {{ clear_thinking is defined }} {{ enable_thinking }}</think>"
    model = glm_model(template)
    assert rendered(model, chat_request(HISTORIES["user"])) == "False False </think>"
    assert rendered(model, chat_request(HISTORIES["user"], enable_thinking=False)) == "True False False</think>"


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        (GLM_COMPACT, {}, (True, False)),
        (GLM_COMPACT, {"enable_thinking": True}, (True, False)),
        (GLM_COMPACT, {"enable_thinking": False}, (False, True)),
        (GLM_LINES, {}, (False, False)),
        (GLM_LINES, {"enable_thinking": False}, (False, True)),
        ("</think><|assistant|><think>\n", {}, (True, False)),
        ("<|assistant|><think>", {}, (False, False)),
        (TEMPLATE, {}, (False, False)),
    ],
)
def test_where_the_answer_begins_is_found_in_the_prompt(
    template: str, options: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    request = chat_request(HISTORIES["user"], **options)
    prompt = render(glm_model(template), request, check_tools(request))
    assert (prompt.in_reasoning, prompt.after_reasoning) == expected


@pytest.mark.parametrize(
    ("template", "thinks", "syntax"),
    [
        (GLM_COMPACT, True, ToolSyntax.GLM_COMPACT),
        (GLM_LINES, True, ToolSyntax.GLM_LINES),
        (HERMES, False, ToolSyntax.JSON_LINE),
        (TEMPLATE, False, ToolSyntax.JSON_LINE),
        ("{{ tools }}[CALL]", False, None),
        ("{{ tools }}{{ raise_exception('no') }}", False, None),
    ],
)
def test_how_answers_look_is_found_in_the_template(template: str, thinks: bool, syntax: ToolSyntax | None) -> None:
    answers = glm_model(template).answers
    assert (answers.reasoning is not None) == thinks
    assert (answers.tools and answers.tools.syntax) == syntax
    if answers.tools is not None:
        assert answers.tools.tag_ids["<tool_call>"] == glm_raw_tokenizer().token_to_id("<tool_call>")


@pytest.mark.parametrize(
    ("template", "options", "field"),
    [
        (TEMPLATE, {"enable_thinking": True}, "enable_thinking"),
        (TEMPLATE, {"clear_thinking": False}, "clear_thinking"),
        ("<think></think>", {"enable_thinking": False}, "enable_thinking"),
    ],
)
def test_what_the_template_cannot_do_is_refused(template: str, options: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{field}: "):
        rendered(glm_model(template), chat_request(HISTORIES["user"], **options))
    allowed: dict[str, Any] = {name: not value for name, value in options.items()}
    rendered(glm_model(template), chat_request(HISTORIES["user"], **allowed))


def test_tools_are_put_into_words_for_a_template_that_shows_none() -> None:
    text = rendered(glm_model(TEMPLATE), chat_request([SYSTEM, *HISTORIES["calls"]], TOOLS))
    before, call_, results, last = (
        "<|system|>Be brief.\n\nYou may call",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        "<tool_response>\n12 °C\n</tool_response>\n<tool_response>",
        "<tool_response>\n15\n</tool_response><|assistant|>",
    )
    assert text.startswith(before)
    assert text.endswith(last)
    assert text.index(json.dumps(TOOLS[0])) < text.index(call_) < text.index(results)
    assert text.count("<|user|>") == 3


@pytest.mark.parametrize("depth", [10, 100, 1000, 10_000, 100_000])
def test_nested_arguments_are_rendered_or_refused(depth: int) -> None:
    deep = '{"a": ' * depth + "1" + "}" * depth
    history = [*HISTORIES["user"], {"role": "assistant", "content": "", "tool_calls": [call(1, "f")]}]
    request = chat_request(history)
    request.messages[1].tool_calls[0].arguments_json = deep
    try:
        assert deep[6:-1] in rendered(glm_model(), request)
    except InvalidArgumentError as error:
        assert depth > 100
        assert str(error).startswith("messages")


def tool(**changes: str) -> dict[str, str]:
    return {"name": "f", "parameters_json_schema": "{}", **changes}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({}, "messages: empty; at least one message is needed"),
    "role": ({"messages": [{"role": 9}]}, "messages[0].role: 9 is not a role; allowed: ROLE_SYSTEM, ROLE_USER"),
    "reasoning": (
        {"messages": [{"role": "ROLE_USER", "reasoning": "hm"}]},
        "messages[0].reasoning: set; allowed only in a message of ROLE_ASSISTANT",
    ),
    "user calls": (
        {"messages": [{"role": "ROLE_USER", "tool_calls": [{"id": "1", "name": "f"}]}]},
        "messages[0].tool_calls: set; allowed only in a message of ROLE_ASSISTANT",
    ),
    "user answers": (
        {"messages": [{"role": "ROLE_USER", "tool_call_id": "1"}]},
        "messages[0].tool_call_id: set; allowed only in a message of ROLE_TOOL",
    ),
    "unknown call": (
        {"messages": [{"role": "ROLE_TOOL", "tool_call_id": "call_9"}]},
        "messages[0].tool_call_id: 'call_9' is not the id of an earlier tool call",
    ),
    "no id": (
        {"messages": [{"role": "ROLE_ASSISTANT", "tool_calls": [{"name": "f"}]}]},
        "messages[0].tool_calls[0].id: '' is empty or of an earlier call",
    ),
    "same id": (
        {"messages": [{"role": "ROLE_ASSISTANT", "tool_calls": [{"name": "f", "id": "1"}, {"name": "f", "id": "1"}]}]},
        "messages[0].tool_calls[1].id: '1' is empty or of an earlier call",
    ),
    "arguments": (
        {"messages": [{"role": "ROLE_ASSISTANT", "tool_calls": [{"name": "f", "id": "1", "arguments_json": '{"a'}]}]},
        "messages[0].tool_calls[0].arguments_json: not JSON: ",
    ),
    "arguments of a kind": (
        {"messages": [{"role": "ROLE_ASSISTANT", "tool_calls": [{"name": "f", "id": "1", "arguments_json": "[1]"}]}]},
        "messages[0].tool_calls[0].arguments_json: '[1]' is not a JSON object",
    ),
    "too many tools": ({"tools": [tool()] * 257}, "tools: 257 entries; allowed: 0 to 256"),
    "no name": ({"tools": [tool(name="")]}, "tools[0].name: '' is no tool's name; allowed: 1 to 128 characters"),
    "odd name": ({"tools": [tool(), tool(name="a b")]}, "tools[1].name: 'a b' is no tool's name"),
    "same name": ({"tools": [tool(), tool()]}, "tools[1].name: 'f' is an earlier tool's name; names must differ"),
    "schema": (
        {"tools": [tool(parameters_json_schema="{")]},
        "tools[0].parameters_json_schema: not JSON: ",
    ),
    "schema deep": (
        {"tools": [tool(parameters_json_schema="[" * 100_000)]},
        "tools[0].parameters_json_schema: not JSON: ",
    ),
    "schema of a list": (
        {"tools": [tool(parameters_json_schema='{"type": "array"}')]},
        'tools[0].parameters_json_schema: of type "array"; allowed: the schema of an object',
    ),
    "choice": ({"tools": [tool()], "tool_choice": {"name": "g"}}, "tool_choice.name: 'g' is none of the tools"),
    "mode": ({"tool_choice": {"mode": 7}}, "tool_choice.mode: 7 is not a mode; allowed: TOOL_MODE_AUTO"),
    "required": (
        {"tool_choice": {"mode": "TOOL_MODE_REQUIRED"}},
        "tool_choice.mode: TOOL_MODE_REQUIRED without tools; give at least one",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_refused_by_field(case: str) -> None:
    fields, text = BAD[case]
    with pytest.raises(InvalidArgumentError) as caught:
        rendered(glm_model(), inference_pb2.ChatRequest(**fields))
    assert str(caught.value).startswith(text)
