"""Output constraints: checked before a request is admitted, and put into the worker's terms.

llguidance reads them all (docs/syntax.md and docs/json_schema.md of github.com/guidance-ai/llguidance). Here they are
checked for what is wrong in themselves; the worker compiles them for its tokeniser and has the last word on their cost.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from glmserve.service.deep_thread import deep_thread
from glmserve.service.status import InvalidArgumentError
from router.errors import UnsupportedError, echo
from router.text.tool_calls import ToolStyle
from router.tool_grammar import SchemaError, ToolRules, answer_grammar, content_rule, tool_rules

MAX_CONSTRAINT_BYTES = 1 << 16
MAX_CHOICES = 1024
# Of all tools together: the conversation's schemas, which agents send with every request.
MAX_TOOLS_BYTES = 1 << 20
_LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)


async def check_constraint(field: str, constraint: inference_pb2.OutputConstraint) -> None:
    """Raises InvalidArgumentError: empty, too large, or wrong in itself, in llguidance's words."""
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidArgumentError(field, "empty; allowed: json_schema, regex, grammar or choices")
    path = f"{field}.{kind}"
    if kind == "choices":
        _check_choices(path, constraint.choices.texts)
    else:
        _check_size(path, getattr(constraint, kind), MAX_CONSTRAINT_BYTES)
    await _check(path, engine_constraint(constraint, None))


def engine_constraint(
    constraint: inference_pb2.OutputConstraint, begin_after_token_id: int | None
) -> engine_pb2.Constraint:
    """The worker's form of `constraint`. `begin_after_token_id`: the token that ends the reasoning, if there is any."""
    made = engine_pb2.Constraint(begin_after_token_id=begin_after_token_id)
    match constraint.WhichOneof("kind"):
        case "json_schema":
            made.json_schema = constraint.json_schema
        case "regex":
            made.regex = constraint.regex
        case "grammar":
            made.lark = constraint.grammar
        case "choices":
            made.regex = "|".join(map(re.escape, constraint.choices.texts))
    return made


async def tool_call_constraint(
    tools: Sequence[inference_pb2.Tool],
    choice: inference_pb2.ToolChoice,
    *,
    parallel: bool,
    style: ToolStyle,
    content: engine_pb2.Constraint | None = None,
) -> engine_pb2.Constraint | None:
    """What an answer with these tools must look like; None if any text will do.

    A named tool or TOOL_MODE_REQUIRED forces calls. Left to the model an answer is text, then calls, and constrained
    if a tool is strict or only one call may be made; or `content`, if given, instead of calls. Raises
    InvalidArgumentError: of `tools`, or `tool_choice`. Raises UnsupportedError: `content` is a grammar.
    """
    forced = bool(choice.name) or choice.mode == inference_pb2.TOOL_MODE_REQUIRED
    if not forced:
        free = content is None and parallel and not any(tool.strict for tool in tools)
        if not tools or free or choice.mode == inference_pb2.TOOL_MODE_NONE:
            return None
    chosen = [(index, tool) for index, tool in enumerate(tools) if choice.name in ("", tool.name)]
    if not chosen:
        given = f"no tool {choice.name!r} is given" if choice.name else "a call is required, but no tools are given"
        raise InvalidArgumentError("tool_choice", given)
    rules = [await _tool_rules(index, tool, style, typed=forced or tool.strict) for index, tool in chosen]
    several = parallel and not choice.name
    rule = None if forced or content is None else _content_rule(content)
    lark = answer_grammar(rules, style, forced=forced, parallel=several, content=rule)
    _check_size("tools", lark, MAX_TOOLS_BYTES)
    return engine_pb2.Constraint(lark=lark)


def _content_rule(content: engine_pb2.Constraint) -> str:
    kind = content.WhichOneof("kind") or ""
    if kind == "lark":
        raise UnsupportedError("constraint.grammar: not together with tools that may be called; set TOOL_MODE_NONE")
    return content_rule(kind, getattr(content, kind))


async def _tool_rules(index: int, tool: inference_pb2.Tool, style: ToolStyle, *, typed: bool) -> ToolRules:
    """Rules of one tool, checked on their own, so that an error names the tool."""
    field = f"tools[{index}].parameters_json_schema"
    schema = None
    if typed:
        text = tool.parameters_json_schema or '{"type": "object", "properties": {}, "additionalProperties": false}'
        _check_size(field, text, MAX_CONSTRAINT_BYTES)
        await _check(field, engine_pb2.Constraint(json_schema=text))
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise InvalidArgumentError(field, f"{echo(text)} is not a schema of an object")
    try:
        made = tool_rules(index, tool.name, schema, style)
    except SchemaError as error:
        raise InvalidArgumentError(field, echo(str(error))) from None
    await _check(field, engine_pb2.Constraint(lark=answer_grammar([made], style, forced=True, parallel=False)))
    return made


def _check_choices(path: str, texts: Sequence[str]) -> None:
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidArgumentError(path, f"{len(texts)} texts; allowed: 1 to {MAX_CHOICES}")
    for index, text in enumerate(texts):
        if not text:
            raise InvalidArgumentError(f"{path}.texts[{index}]", "empty; a choice has at least one character")
    _check_size(path, "".join(texts), MAX_CONSTRAINT_BYTES)


def _check_size(path: str, text: str, most: int) -> None:
    size = len(text.encode())
    if not 1 <= size <= most:
        raise InvalidArgumentError(path, f"{size} bytes long; allowed: 1 to {most} bytes")


async def _check(path: str, constraint: engine_pb2.Constraint) -> None:
    kind = constraint.WhichOneof("kind") or ""
    fault = await asyncio.get_running_loop().run_in_executor(_threads(), _fault, kind, getattr(constraint, kind))
    if fault:
        raise InvalidArgumentError(path, echo(fault))


@lru_cache(maxsize=256)
def _fault(kind: str, text: str) -> str:
    """What is wrong with a constraint, in one line; empty: nothing. Does not hold the interpreter lock."""
    try:
        grammar = getattr(LLMatcher, f"grammar_from_{kind}")(text)
        wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    except ValueError as error:  # not JSON
        return str(error)
    return " ".join(messages[0].split()) if wrong else ""


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    """One thread: checks of costly constraints wait for each other, not the event loop for them."""
    return deep_thread("constraint")
