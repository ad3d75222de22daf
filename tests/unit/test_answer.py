"""Content, reasoning and tool calls out of the ids of an answer: the faults that other engines shipped, one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.text.answer import AnswerPlan, AnswerReader
from router.text.argument_types import ArgumentTypes, value_json
from router.text.detokenizer import Detokenizer
from router.text.tool_calls import ToolSyntax
from tests.unit.answer_harness import TOOLS, Answer, encode, read, style, tokenizer
from tests.unit.router_harness import byte_ids


def answer(text: str, syntax: ToolSyntax = ToolSyntax.GLM_COMPACT, **options: Any) -> Answer:
    """Tags are tokens, each a chunk of its own."""
    chunks = [[token_id] for token_id in encode(text)]
    return read(chunks, style(syntax, tags=True), Detokenizer(tokenizer(tags=True)), **options)


def call_of(name: str, *arguments: tuple[str, str]) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments)
    return f"<tool_call>{name}{pairs}</tool_call>"


def reader(**plan: Any) -> AnswerReader:
    return AnswerReader(
        Detokenizer(tokenizer(tags=True)),
        style(ToolSyntax.GLM_COMPACT, tags=True),
        AnswerPlan(tools=TOOLS, **plan),
        lambda: "id",
    )


# ---- fault 8: streamed tool calls ----


def test_one_delta_may_hold_the_end_of_a_call_and_the_beginning_of_the_next() -> None:
    made = reader()
    made.push(encode(call_of("write", ("path", "a"))[: -len("</tool_call>")]))
    made.take()
    made.push(encode("</tool_call><tool_call>now</tool_call>"))
    first, second = made.take().calls
    assert (first.index, first.name, first.arguments_json) == (0, "", '"}')
    assert (second.index, second.id, second.name, second.arguments_json) == (1, "id", "now", "{}")


def test_a_call_without_arguments_is_a_call() -> None:
    [call] = answer("<tool_call>now</tool_call>").calls
    assert (call.name, call.arguments) == ("now", "{}")


def test_the_last_piece_repeats_nothing() -> None:
    made = reader()
    pieces = []
    for token_id in encode(call_of("write", ("path", "/tmp/file"), ("text", "line"))):
        made.push([token_id])
        pieces += [call.arguments_json for call in made.take().calls]
    made.finish(stopped=True)
    assert made.take().calls == []
    assert len(pieces) > 5
    assert json.loads("".join(pieces)) == {"path": "/tmp/file", "text": "line"}


def test_space_in_string_arguments_is_kept() -> None:
    [call] = answer(call_of("write", ("text", "\n  def f():\n\treturn 1\n\n"))).calls
    assert json.loads(call.arguments) == {"text": "\n  def f():\n\treturn 1\n\n"}


@pytest.mark.parametrize("text", ["123_456", "10001", "1e5", "null", "true", '"quoted"', "[1]", '{"a": 1}', ""])
def test_a_string_stays_a_string(text: str) -> None:
    [call] = answer(call_of("write", ("text", text))).calls
    assert json.loads(call.arguments) == {"text": text}


def test_an_end_tag_spelled_within_an_argument_is_text() -> None:
    spelled = "a</tool_call>b</arg_value>c"
    ids = [*encode("<tool_call>write<arg_key>text</arg_key><arg_value>"), *byte_ids(spelled.encode())]
    ids += encode("</arg_value></tool_call>")
    made = read([ids], style(ToolSyntax.GLM_COMPACT, tags=True), Detokenizer(tokenizer(tags=True)))
    [call] = made.calls
    assert json.loads(call.arguments) == {"text": spelled}
    assert made.whole


def test_an_end_tag_as_a_token_within_an_argument_is_text() -> None:
    [call] = answer(call_of("write", ("text", "print('</tool_call>')</think>"))).calls
    assert json.loads(call.arguments) == {"text": "print('</tool_call>')</think>"}


# ---- fault 9: thinking ----


def test_without_thinking_the_answer_is_content() -> None:
    assert answer("Paris.", after_reasoning=True) == Answer("Paris.")


def test_a_model_that_skips_thinking_still_answers() -> None:
    assert answer("</think>Paris.", in_reasoning=True) == Answer("Paris.", reasoning_tokens=1)
    assert answer("Paris.") == Answer("Paris.")
    assert answer("<think></think>Paris.") == Answer("Paris.", reasoning_tokens=2)


def test_an_end_of_reasoning_that_was_none_is_no_content() -> None:
    assert answer("</think>\nParis.", after_reasoning=True) == Answer("Paris.")


def test_reasoning_tokens_are_those_up_to_its_end() -> None:
    text = "Let me see.</think>"
    made = answer(text + "Paris.", in_reasoning=True)
    assert (made.reasoning, made.reasoning_tokens) == ("Let me see.", len(encode(text)))


def test_the_end_of_reasoning_spelled_by_other_tokens_is_reasoning() -> None:
    ids = [*byte_ids(b"so </think> is a tag"), *encode("</think>Yes")]
    made = read([ids], style(ToolSyntax.GLM_COMPACT, tags=True), Detokenizer(tokenizer(tags=True)), in_reasoning=True)
    assert (made.reasoning, made.content) == ("so </think> is a tag", "Yes")


def test_a_model_that_answers_within_the_reasoning_leaves_no_empty_content() -> None:
    """It was told to think, did not, and ended its turn: nobody can tell its answer from reasoning."""
    made = answer("Paris.", in_reasoning=True)
    assert (made.content, made.reasoning) == ("Paris.", "Paris.")
    assert answer("Paris.", in_reasoning=True, stopped=False).content == ""
    made = answer("Paris. END x", in_reasoning=True, stops=["END"])
    assert (made.content, made.stop) == ("Paris. ", "END")


def test_a_call_of_a_known_tool_ends_the_reasoning() -> None:
    """The model forgets </think> before a call, though it means it: the tag is a token it writes for nothing else."""
    text = f"I look it up.\n{call_of('write', ('path', 'a'))}"
    made = answer(text, in_reasoning=True)
    assert (made.reasoning, made.content, len(made.calls), made.whole) == ("I look it up.", "", 1, True)
    assert made.reasoning_tokens == len(encode("I look it up.\n<tool_call>write")) + 1


def test_what_is_no_call_of_a_known_tool_is_reasoning() -> None:
    made = answer("One writes <tool_call>name</tool_call>.</think>Done.", in_reasoning=True)
    assert (made.reasoning, made.content, made.calls) == ("One writes <tool_call>name</tool_call>.", "Done.", ())
    assert made.reasoning_tokens == len(encode("One writes <tool_call>name</tool_call>.</think>"))
    made = answer("First <tool_call>now</tool_call>.</think>Done.", in_reasoning=True, tools=None)
    assert (made.reasoning, made.content, made.calls) == ("First <tool_call>now</tool_call>.", "Done.", ())


# ---- faults 16 and 17: characters and stop strings ----


def test_characters_in_pieces_arrive_whole_in_every_part() -> None:
    text = "思考</think>答え<tool_call>write<arg_key>text</arg_key><arg_value>日本🙂"
    ids = [token_id for part in text.split("|") for token_id in encode(part)]
    bytewise: list[int] = []
    table = tokenizer(tags=True).token_bytes
    for token_id in ids:
        data = table[token_id]
        bytewise += [token_id] if data.startswith(b"<") else byte_ids(data)
    made = read(
        [[token_id] for token_id in bytewise],
        style(ToolSyntax.GLM_COMPACT, tags=True),
        Detokenizer(tokenizer(tags=True)),
        in_reasoning=True,
        stopped=False,
    )
    assert (made.reasoning, made.content, made.calls[0].arguments) == ("思考", "答え", '{"text": "日本🙂')


def test_a_replacement_character_of_the_model_is_released_and_a_cut_character_becomes_one() -> None:
    assert answer("a\ufffdb").content == "a\ufffdb"
    ids = byte_ids("é".encode()[:1])
    tokens = tokenizer(tags=True)
    assert read([ids], style(ToolSyntax.GLM_COMPACT, tags=True), Detokenizer(tokens)).content == "\ufffd"
    made = read(
        [[*ids, *encode("</think>x")]],
        style(ToolSyntax.GLM_COMPACT, tags=True),
        Detokenizer(tokens),
        in_reasoning=True,
    )
    assert (made.reasoning, made.content) == ("\ufffd", "x")


def test_the_beginning_of_a_stop_string_never_shows() -> None:
    made = reader(stops=["END NOW"])
    shown = ""
    for token_id in byte_ids(b"one END two END NOW"):
        made.push([token_id])
        shown += made.take().content
        assert shown == "one END two "[: len(shown)]
    made.finish(stopped=False)
    assert (made.ended, made.stop, shown + made.take().content) == (True, "END NOW", "one END two ")


def test_what_is_held_back_for_a_stop_string_splits_no_tag() -> None:
    made = answer("a <tool_call>now</tool_call>", stops=["<tool_call> x", " <"])
    assert (made.content, [call.name for call in made.calls], made.stop) == ("a", ["now"], None)


def test_stop_strings_are_looked_for_in_the_content_alone() -> None:
    made = answer("a\nb</think>" + call_of("write", ("text", "c\nd")), in_reasoning=True, stops=["\n"])
    assert (made.reasoning, made.calls[0].arguments, made.stop) == ("a\nb", '{"text": "c\\nd"}', None)


def test_the_first_min_tokens_ids_are_not_searched() -> None:
    tokens = tokenizer(tags=True)
    ids = byte_ids(b"xxaxb")
    made = read([ids], style(ToolSyntax.GLM_COMPACT, tags=True), Detokenizer(tokens), stops=["x"], min_tokens=2)
    assert (made.content, made.stop) == ("xxa", "x")


# ---- types ----


@pytest.mark.parametrize(
    ("argument", "text", "expected"),
    [
        ("count", " 12 ", 12),
        ("count", "twelve", "twelve"),
        ("ratio", "1e-3", 0.001),
        ("dry", "false", False),
        ("items", '[{"a": "x"}]', [{"a": "x"}]),
        ("options", '{"a": {"b": [null]}}', {"a": {"b": [None]}}),
        ("maybe", "null", None),
        ("maybe", "nullable", "nullable"),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "5 apples", "5 apples"),
        ("level", "low", "low"),
        ("unknown", "[1, 2]", [1, 2]),
        ("unknown", "plain", "plain"),
        ("count", "NaN", "NaN"),
        ("items", "[" * 10_000, "[" * 10_000),
    ],
)
def test_values_are_typed_by_the_schema(argument: str, text: str, expected: Any) -> None:
    [call] = answer(call_of("plan", (argument, text))).calls
    assert json.loads(call.arguments) == {argument: expected}


def test_an_unknown_tool_is_passed_on_for_the_client_to_refuse() -> None:
    [call] = answer(call_of("erase", ("a", "1"), ("b", "x"))).calls
    assert (call.name, json.loads(call.arguments)) == ("erase", {"a": 1, "b": "x"})


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "number"}, {"integer", "number"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"oneOf": [{"const": 1}, {"enum": ["a", None]}]}, {"integer", "string", "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
    ],
)
def test_types_of_a_schema(schema: dict[str, Any], expected: set[str]) -> None:
    root = {"properties": {"x": schema}, "$defs": {"a/b": {"type": "boolean"}}}
    assert ArgumentTypes.of_schema(root).of("x") == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"$ref": "#/properties/x"}}},
        {"properties": {"x": {"$ref": "#/nowhere"}}},
        {"properties": {"x": {"type": "strange"}}},
        {"properties": {"x": {"type": 5, "anyOf": 3, "$ref": 1}}},
        {"properties": 5},
        {},
    ],
)
def test_a_schema_that_tells_nothing_allows_anything(schema: dict[str, Any]) -> None:
    types = ArgumentTypes.of_schema(schema).of("x")
    assert (value_json("1", types), value_json("a", types)) == ("1", '"a"')
