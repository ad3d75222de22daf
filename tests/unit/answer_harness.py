"""Tokenisers and readers of answers for tests."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Tokenizer

from router.text.answer import AnswerPlan, AnswerReader, AnswerStyle
from router.text.argument_types import ArgumentTypes
from router.text.reasoning import END_THINK, THINK, ReasoningStyle
from router.text.tokenizer import TextTokenizer
from router.text.tool_calls import TAGS, ToolStyle, ToolSyntax
from tests.unit.router_harness import raw_tokenizer

SCHEMAS: dict[str, dict[str, Any]] = {
    "now": {"type": "object", "properties": {}},
    "write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "plan": {
        "type": "object",
        "properties": {
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "dry": {"type": "boolean"},
            "items": {"type": "array", "items": {"type": "object"}},
            "options": {"$ref": "#/$defs/options"},
            "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "level": {"enum": ["low", "high"]},
        },
        "$defs": {"options": {"type": "object"}},
    },
}
TOOLS = {name: ArgumentTypes.of_schema(schema) for name, schema in SCHEMAS.items()}


@functools.cache
def raw_answer_tokenizer(*, tags: bool) -> Tokenizer:
    """The harness's tokeniser; with `tags`, tags are tokens of their own, as GLM's."""
    raw = Tokenizer.from_str(raw_tokenizer().to_str())
    if tags:
        raw.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (THINK, END_THINK, *TAGS)])
    return raw


@functools.cache
def tokenizer(*, tags: bool) -> TextTokenizer:
    raw = raw_answer_tokenizer(tags=tags)
    return TextTokenizer(raw, raw.get_vocab_size())


def encode(text: str) -> list[int]:
    """With tags as tokens."""
    ids: list[int] = raw_answer_tokenizer(tags=True).encode(text).ids
    return ids


def style(syntax: ToolSyntax, *, tags: bool, thinks: bool = True) -> AnswerStyle:
    ids = tokenizer(tags=True).added_ids if tags else {}
    think_ids = {tag: ids[tag] for tag in (THINK, END_THINK) if tag in ids}
    return AnswerStyle(
        ReasoningStyle(think_ids) if thinks else None,
        ToolStyle(syntax, {tag: ids[tag] for tag in TAGS if tag in ids}),
    )


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    whole: bool = False
    stop: str | None = None
    reasoning_tokens: int = 0


class PieceDetokenizer:
    """Ids are positions in a list of texts: a text may be cut into tokens in any way."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in ids)

    def finish(self) -> str:
        return ""


def read_pieces(pieces: Sequence[str], syntax: ToolSyntax, *, tags: bool, **options: Any) -> Answer:
    """Read an answer whose tokens are `pieces`; with `tags`, those that are tags are known as such."""
    offset = 1000
    tag_ids = {tag: offset + number for number, tag in enumerate((THINK, END_THINK, *TAGS))} if tags else {}
    ids = [tag_ids.get(piece, number) for number, piece in enumerate(pieces)]
    think_ids = {tag: tag_ids[tag] for tag in (THINK, END_THINK) if tags}
    known = AnswerStyle(ReasoningStyle(think_ids), ToolStyle(syntax, {tag: tag_ids[tag] for tag in TAGS if tags}))
    answer = read([[token_id] for token_id in ids], known, PieceDetokenizer(pieces), **options)
    return replace(answer, reasoning_tokens=0)


def read(
    chunks: Sequence[Sequence[int]],
    answer_style: AnswerStyle,
    detokenizer: Any,
    *,
    stopped: bool = True,
    tools: Mapping[str, ArgumentTypes] | None = TOOLS,
    **plan: Any,
) -> Answer:
    """Read an answer that comes in these chunks, as a client does that concatenates."""
    numbers = itertools.count()
    reader = AnswerReader(detokenizer, answer_style, AnswerPlan(tools=tools, **plan), lambda: f"call_{next(numbers)}")
    content = reasoning = ""
    calls: list[list[str]] = []

    def take() -> None:
        nonlocal content, reasoning
        piece = reader.take()
        content += piece.content
        reasoning += piece.reasoning
        for call in piece.calls:
            if call.id:
                assert call.index == len(calls)
                assert call.id == f"call_{call.index}"
                calls.append([call.name, ""])
            else:
                assert not call.name
            calls[call.index][1] += call.arguments_json

    for chunk in chunks:
        reader.push(chunk)
        take()
        if reader.ended:
            break
    reader.finish(stopped=stopped)
    take()
    whole = tuple(Call(*each) for each in calls)
    return Answer(content, reasoning, whole, reader.calls_whole, reader.stop, reader.reasoning_tokens)
