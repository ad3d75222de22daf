"""The same answer comes out of the same text, however it is cut into tokens and chunks, and it is the right one."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from router.text.reasoning import END_THINK, THINK
from router.text.tool_calls import TAGS, ToolSyntax
from tests.fuzzing import fuzz
from tests.unit.answer_harness import Answer, Call, encode, read, read_pieces, style, tokenizer
from tests.unit.router_harness import byte_ids

LINES, COMPACT, JSON = ToolSyntax.GLM_LINES, ToolSyntax.GLM_COMPACT, ToolSyntax.JSON_LINE
_TAG = re.compile("|".join(map(re.escape, (THINK, END_THINK, *TAGS))))


# A token of more characters than any tag has.
_LONGEST = max(map(len, TAGS)) + 1


def call(name: str, **arguments: Any) -> Call:
    return Call(name, json.dumps(arguments, ensure_ascii=False))


# Name -> syntax, what the model writes, how it ends, the answer.
CORPUS: dict[str, tuple[ToolSyntax, str, dict[str, Any], Answer]] = {
    "plain": (COMPACT, " Hello,\n 你好 🙂 < b\n", {}, Answer(" Hello,\n 你好 🙂 < b\n")),
    "tag begun": (COMPACT, "a <tool_cal", {}, Answer("a <tool_cal")),
    "thinks": (COMPACT, "\n<think>\nhm <b> \n\nok\n</think>\n\nYes. \n", {}, Answer("Yes. \n", "hm <b> \n\nok")),
    "thinks on": (COMPACT, "hm</think>Yes", {"in_reasoning": True}, Answer("Yes", "hm")),
    "skips thinking": (COMPACT, "</think>Yes", {"in_reasoning": True}, Answer("Yes")),
    "cut in thinking": (COMPACT, "hm, 思 ", {"in_reasoning": True, "stopped": False}, Answer("", "hm, 思")),
    "answers at once": (COMPACT, "\nhm, 思 ", {"in_reasoning": True}, Answer("hm, 思", "hm, 思")),
    "calls at once": (
        COMPACT,
        "hm\n<tool_call>now</tool_call></think>",
        {"in_reasoning": True},
        Answer("", "hm", (call("now"),), whole=True),
    ),
    "talks of calls": (
        COMPACT,
        "a <tool_call>x</tool_call> <tool_call>now then</tool_call> b</think>c",
        {"in_reasoning": True},
        Answer("c", "a <tool_call>x</tool_call> <tool_call>now then</tool_call> b"),
    ),
    "json calls at once": (
        JSON,
        'hm <tool_call>{"name": "no"}</tool_call> <tool_call>{"name": "now"}</tool_call>',
        {"in_reasoning": True},
        Answer("", 'hm <tool_call>{"name": "no"}</tool_call>', (call("now"),), whole=True),
    ),
    "never thinks": (COMPACT, "\nYes", {"after_reasoning": True}, Answer("Yes")),
    "tags alone": (COMPACT, "I </arg_key></tool_call> b", {}, Answer("I </arg_key></tool_call> b")),
    "calls are text": (
        COMPACT,
        "I <tool_call>now</tool_call> ",
        {"tools": None},
        Answer("I <tool_call>now</tool_call> "),
    ),
    "no argument": (COMPACT, "<tool_call>now</tool_call>", {}, Answer(calls=(call("now"),), whole=True)),
    "no argument in lines": (LINES, "<tool_call>now\n</tool_call>\n", {}, Answer(calls=(call("now"),), whole=True)),
    "lines": (
        LINES,
        "I look.\n<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>/tmp/日本</arg_value>\n"
        '<arg_key>text</arg_key>\n<arg_value>  a\n\tb 🙂"\\\n</arg_value>\n</tool_call>\n',
        {},
        Answer("I look.", calls=(call("write", path="/tmp/日本", text='  a\n\tb 🙂"\\\n'),), whole=True),
    ),
    "two after thinking": (
        COMPACT,
        "hm</think><tool_call>now</tool_call><tool_call>write<arg_key>path</arg_key><arg_value>10001</arg_value>"
        "</tool_call>",
        {"in_reasoning": True},
        Answer("", "hm", (call("now"), call("write", path="10001")), whole=True),
    ),
    "nested": (
        COMPACT,
        '<tool_call>plan<arg_key>options</arg_key><arg_value>{"a": [1, {"b": "<x>é"}], "c": null}</arg_value>'
        "<arg_key>dry</arg_key><arg_value>true</arg_value></tool_call>",
        {},
        Answer(calls=(call("plan", options={"a": [1, {"b": "<x>é"}], "c": None}, dry=True),), whole=True),
    ),
    "tag in a string": (
        COMPACT,
        "<tool_call>write<arg_key>text</arg_key><arg_value></tool_call><arg_key></think></arg_value> x</arg_value>"
        "</tool_call>",
        {},
        Answer(calls=(call("write", text="</tool_call><arg_key></think></arg_value> x"),), whole=True),
    ),
    "missing tag": (
        COMPACT,
        "<tool_call>write<arg_key>path</arg_key>\nx</arg_value></arg_value></tool_call>",
        {},
        Answer(calls=(call("write", path="x</arg_value>"),), whole=True),
    ),
    "cut before a tag": (
        COMPACT,
        "<tool_call>write<arg_key>path</arg_key><arg_value>x</arg_value><",
        {"stopped": False},
        Answer(calls=(Call("write", '{"path": "x</arg_value><'),)),
    ),
    "cut in a name": (COMPACT, "Well <tool_call>wri", {"stopped": False}, Answer("Well")),
    "cut in a string": (
        COMPACT,
        "<tool_call>write<arg_key>path</arg_key><arg_value>/tm\np",
        {"stopped": False},
        Answer(calls=(Call("write", '{"path": "/tm\\np'),)),
    ),
    "cut in a number": (
        COMPACT,
        "<tool_call>plan<arg_key>dry</arg_key><arg_value>true</arg_value><arg_key>count</arg_key><arg_value>12",
        {"stopped": False},
        Answer(calls=(Call("plan", '{"dry": true'),)),
    ),
    "cut after a call": (
        COMPACT,
        "<tool_call>now</tool_call><tool_call>now",
        {"stopped": False},
        Answer(calls=(call("now"),), whole=True),
    ),
    "ended without end": (
        COMPACT,
        "<tool_call>plan<arg_key>count</arg_key><arg_value>12</arg_value>",
        {"stopped": True},
        Answer(calls=(call("plan", count=12),), whole=True),
    ),
    "no call": (COMPACT, "Use <tool_call> as it is</tool_call>.", {}, Answer("Use <tool_call> as it is</tool_call>.")),
    "only one": (
        COMPACT,
        "<tool_call>now</tool_call><tool_call>now</tool_call>",
        {"single_call": True},
        Answer(calls=(call("now"),), whole=True),
    ),
    "stop": (
        COMPACT,
        "hm STOP</think>one two STOP three",
        {"in_reasoning": True, "stops": ["STOP"]},
        Answer("one two ", "hm STOP", stop="STOP"),
    ),
    "json": (
        JSON,
        'So:\n<tool_call>\n{"name": "write", "arguments": {"text": "</tool_call> \\" {🙂", "n": [1, {}]} }\n'
        '</tool_call>\n<tool_call>{"name":"now"}</tool_call>',
        {},
        Answer("So:", calls=(Call("write", '{"text": "</tool_call> \\" {🙂", "n": [1, {}]}'), call("now")), whole=True),
    ),
    "json name last": (
        JSON,
        '<tool_call>{"arguments": {"a" : 1}, "name": "write"}</tool_call>',
        {},
        Answer(calls=(Call("write", '{"a" : 1}'),), whole=True),
    ),
    "json in a string": (
        JSON,
        '<tool_call>{"name": "write", "arguments": "{\\"a\\": 1}"}</tool_call>',
        {},
        Answer(calls=(Call("write", '{"a": 1}'),), whole=True),
    ),
    "json without its end": (
        JSON,
        '<tool_call>{"name": "write", "arguments": {"a": 1}</tool_call> ok',
        {},
        Answer("ok", calls=(Call("write", '{"a": 1}'),), whole=True),
    ),
    "json broken": (
        JSON,
        '<tool_call>{"name": "write", "arguments": {"a": <</tool_call>',
        {},
        Answer(calls=(Call("write", '{"a": '),)),
    ),
    "json cut": (
        JSON,
        '<tool_call>{"name": "write", "arguments": {"a": "日',
        {"stopped": False},
        Answer(calls=(Call("write", '{"a": "日'),)),
    ),
    "no json": (JSON, "<tool_call> what </tool_call>", {}, Answer("<tool_call> what </tool_call>")),
}


def units(text: str, *, tags: bool) -> list[str]:
    """Characters; with `tags`, each tag is one."""
    parts = re.split(f"({_TAG.pattern})", text) if tags else [text]
    return [unit for part in parts for unit in ([part] if tags and _TAG.fullmatch(part) else part)]


def cut(parts: list[str], cuts: list[int], *, tags: bool) -> list[str]:
    """Tokens: what is between the cuts, but with `tags` no token has a tag and something else."""
    pieces: list[str] = []
    for begin, end in itertools.pairwise([0, *cuts, len(parts)]):
        text = ""
        for part in parts[begin:end]:
            if tags and _TAG.fullmatch(part):
                pieces += [text, part]
                text = ""
            else:
                text += part
        pieces.append(text)
    return [piece for piece in pieces if piece]


@pytest.mark.parametrize("tags", [True, False], ids=["ids", "spelled"])
@pytest.mark.parametrize("name", CORPUS)
def test_every_two_cuts(name: str, tags: bool) -> None:
    syntax, text, options, expected = CORPUS[name]
    parts = units(text, tags=tags)
    for first in range(len(parts) + 1):
        for second in range(first, min(first + _LONGEST, len(parts)) + 1):
            pieces = cut(parts, [first, second], tags=tags)
            assert read_pieces(pieces, syntax, tags=tags, **options) == expected, pieces


@pytest.mark.parametrize("tags", [True, False], ids=["ids", "spelled"])
@pytest.mark.parametrize("name", CORPUS)
def test_random_cuts(name: str, tags: bool) -> None:
    syntax, text, options, expected = CORPUS[name]
    parts = units(text, tags=tags)
    source = random.Random(name)
    for _ in range(100):
        count = source.randrange(len(parts) + 1)
        pieces = cut(parts, sorted(source.sample(range(len(parts) + 1), count)), tags=tags)
        assert read_pieces(pieces, syntax, tags=tags, **options) == expected, pieces


@pytest.mark.parametrize("name", CORPUS)
def test_every_byte_a_token(name: str) -> None:
    syntax, text, options, expected = CORPUS[name]
    chunks = [[token_id] for token_id in byte_ids(text.encode())]
    answer = read(chunks, style(syntax, tags=False), Detokenizer(tokenizer(tags=False)), **options)
    assert replace(answer, reasoning_tokens=0) == expected


@pytest.mark.parametrize("name", CORPUS)
def test_chunks_of_many_tokens(name: str) -> None:
    syntax, text, options, expected = CORPUS[name]
    tokens = tokenizer(tags=True)
    ids = encode(text)
    source = random.Random(name)
    answers = set()
    for _ in range(20):
        cuts = sorted(source.choices(range(len(ids) + 1), k=source.randrange(len(ids))))
        chunks = [ids[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(ids)])]
        answers.add(read(chunks, style(syntax, tags=True), Detokenizer(tokens), **options))
    [answer] = answers
    assert replace(answer, reasoning_tokens=0) == expected


_WORDS = [THINK, END_THINK, *TAGS, "now", "write", "path", " ", "\n", "a", "日", '"', "{", "}", "<", "STOP"]
_JSON_WORDS = [*TAGS[:2], '{"name": "now", "arguments": {', '"a": ', '"b\\"', "}", "}", ", ", "null", " ", "<"]


@fuzz(300)
@given(
    st.lists(st.sampled_from(_WORDS) | st.sampled_from(_JSON_WORDS), max_size=24),
    st.sampled_from(ToolSyntax),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
    st.sampled_from([(), ("STOP",), ("\n",)]),
)
def test_any_words(
    words: list[str], syntax: ToolSyntax, tags: bool, stopped: bool, seed: int, stops: tuple[str, ...]
) -> None:
    """No cut changes the answer, and calls that are whole are JSON objects, as far as the model wrote JSON."""
    options: dict[str, Any] = {"stopped": stopped, "stops": stops}
    parts = units("".join(words), tags=tags)
    whole = read_pieces(cut(parts, [], tags=tags), syntax, tags=tags, **options)
    source = random.Random(seed)
    for count in (1, 2, 8, len(parts)):
        cuts = sorted(source.choices(range(len(parts) + 1), k=count))
        assert read_pieces(cut(parts, cuts, tags=tags), syntax, tags=tags, **options) == whole
    if whole.whole and syntax is not JSON:
        assert all(isinstance(json.loads(made.arguments), dict) for made in whole.calls)
