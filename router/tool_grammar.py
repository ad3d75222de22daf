"""Grammars of tool calls in a checkpoint's own syntax, in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.argument_types import STRING, SchemaTypes, resolve_reference
from router.text.tool_calls import (
    ARG_KEY,
    ARG_VALUE,
    END_ARG_KEY,
    END_ARG_VALUE,
    END_TOOL_CALL,
    TOOL_CALL,
    ToolStyle,
    ToolSyntax,
)

# As much as any pretty printer writes between two tokens; without a bound a model can write spaces for ever.
JSON_SPACE = r"[ \t]{1,24}|\r?\n[ \t]{0,24}"
_ANY_TEXT = "/(?s:.*)/"
_SHARED = ("$defs", "definitions")
# An escape, a class, or one character. A class that nothing closes goes to the end: what is tried twice is quadratic.
_REGEX_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*+(?:\]|\\?\Z)|.", re.DOTALL)
# References may be circular, and the ways that they make more than can be gone.
_MAX_DEPTH = 16
_MAX_FORMS = 1024


class SchemaError(ValueError):
    """A tool's schema of which no grammar can be made: why."""


@dataclass(frozen=True)
class ToolRules:
    """Rules of one tool; `start` is the one for what comes after <tool_call>, </tool_call> included."""

    start: str
    rules: tuple[str, ...]


def answer_grammar(
    tools: Sequence[ToolRules], style: ToolStyle, *, forced: bool, parallel: bool, content: str | None = None
) -> str:
    """Calls of `tools`: one or, if `parallel`, more. Unless `forced`, text may come before them or instead of them.

    `content`: what must then stand instead of them, of `content_rule`; no text comes before calls.
    """
    calls = "head body" + (" more*" if parallel else "")
    opening = _tag(style, TOOL_CALL)
    lines = [
        f"start: {calls}" if forced else f"start: {'TEXT' if content is None else 'content'} | {calls}",
        f"body: {' | '.join(tool.start for tool in tools)}",
        f"TEXT: {_without(TOOL_CALL)}",
        "BREAK: /\\n{1,2}/",
    ]
    if content is not None:
        lines.append(f"content: {content}")
    if forced or content is not None:
        lines.append(f"head: BREAK? {opening}")
    elif TOOL_CALL in style.tag_ids:
        lines.append(f"head: TEXT {opening}")
    else:
        lines.append(f"head[lazy]: {_ANY_TEXT} {opening}")
    if parallel:
        lines.append(f"more: BREAK? {opening} body")
    return "\n".join((*lines, *(rule for tool in tools for rule in tool.rules))) + "\n"


def content_rule(kind: str, text: str) -> str:
    """The body of a rule for a whole content. `kind`: json_schema or regex."""
    if kind == "regex":
        return _regex(text)
    schema = json.loads(text)
    return _json({} if schema is True else schema)


def tool_rules(index: int, name: str, schema: Mapping[str, Any] | None, style: ToolStyle) -> ToolRules:
    """`index` tells the tool's rules from those of others. `schema`: of its arguments; None: any arguments.

    GLM's syntax: arguments in the schema's order. Of a string's schema enum, const, pattern and lengths count; a string
    never holds the closing tag. Raises SchemaError.
    """
    if style.syntax is ToolSyntax.JSON_LINE:
        return _json_rules(index, name, {"type": "object"} if schema is None else schema, style)
    return _GlmRules(index, style, schema or {}).of(name, free=schema is None)


def _json_rules(index: int, name: str, schema: Mapping[str, Any], style: ToolStyle) -> ToolRules:
    call = {
        **_shared(schema),
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": schema},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return ToolRules(f"t{index}", (f"t{index}: BREAK? {_json(call)} BREAK? {_tag(style, END_TOOL_CALL)}",))


class _GlmRules:
    """Collects the rules of one tool in GLM's syntax."""

    def __init__(self, index: int, style: ToolStyle, schema: Mapping[str, Any]) -> None:
        self._index = index
        self._style = style
        self._schema = schema
        self._rules: list[str] = []
        self._line_end = '"\\n"' if style.syntax is ToolSyntax.GLM_LINES else ""

    def of(self, name: str, *, free: bool) -> ToolRules:
        arguments = [self._free_argument()] if free else list(self._arguments())
        start = f"t{self._index}"
        parts = [_literal(name), self._line_end, *arguments, _tag(self._style, END_TOOL_CALL)]
        return ToolRules(start, (f"{start}: {' '.join(filter(None, parts))}", *self._rules))

    def _arguments(self) -> Iterator[str]:
        properties = self._schema.get("properties")
        required = self._schema.get("required")
        names = required if isinstance(required, list) else []
        forms = _Forms(self._schema)
        for key, schema in (properties if isinstance(properties, dict) else {}).items():
            argument = self._argument(_literal(key), list(forms.of(schema)))
            yield argument if key in names else f"{argument}?"
        if not properties and self._schema.get("additionalProperties") not in (None, False):
            yield self._free_argument()

    def _free_argument(self) -> str:
        return self._argument("/[^<\\n]{1,256}/", [_Text(())]) + "*"

    def _argument(self, key: str, values: list[_Text | _Json]) -> str:
        """Name of the rule of one argument."""
        name = self._name("a")
        tags = (_tag(self._style, tag) for tag in (ARG_KEY, END_ARG_KEY, ARG_VALUE))
        opening, closing, value_opening = tags
        endings = " | ".join(self._value(value) for value in values)
        parts = [opening, key, closing, self._line_end, value_opening, f"({endings})", self._line_end]
        self._rules.append(f"{name}: {' '.join(filter(None, parts))}")
        return name

    def _value(self, value: _Text | _Json) -> str:
        """A value and the tag that closes it."""
        closing = _tag(self._style, END_ARG_VALUE)
        if isinstance(value, _Json):
            return f"{_json(value.schema)} {closing}"
        body = self._name("V")
        self._rules.append(f"{body}: {' & '.join((_without(END_ARG_VALUE), *value.patterns))}")
        if END_ARG_VALUE in self._style.tag_ids:
            return f"{body} {closing}"
        ending = self._name("v")
        self._rules.append(f"{ending}[lazy]: {body} {closing}")
        return ending

    def _name(self, kind: str) -> str:
        return f"{kind}{self._index}_{len(self._rules)}"


@dataclass(frozen=True)
class _Text:
    """A string as it is, which all of `patterns`, terminals, match."""

    patterns: tuple[str, ...]


@dataclass(frozen=True)
class _Json:
    schema: Mapping[str, Any]


class _Forms:
    """The forms in which values of `root`'s parts may be written."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._types = SchemaTypes(_shared(root))
        self._left = _MAX_FORMS

    def of(self, schema: Any, depth: int = _MAX_DEPTH) -> Iterator[_Text | _Json]:
        """Raises SchemaError: they are too many."""
        self._left -= 1
        if self._left < 0:
            raise SchemaError(f"its arguments may be written in more than {_MAX_FORMS} forms; use a simpler schema")
        if not isinstance(schema, dict):
            yield _Text(())  # anything
            return
        types = self._types.allowed(schema)
        if STRING not in types:
            yield _Json({**_shared(self._root), **schema})
            return
        constants = [schema["const"]] if "const" in schema else schema.get("enum")
        options = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(constants, list):
            yield from _constants(constants)
        elif depth and isinstance(options, list):
            for option in options:
                yield from self.of(option, depth - 1)
        elif depth and "$ref" in schema:
            yield from self.of(resolve_reference(schema["$ref"], self._root), depth - 1)
        else:
            yield _Text(tuple(_patterns(schema)))
            others = sorted(types - {STRING})
            if others and "type" in schema:
                yield _Json({**_shared(self._root), **schema, "type": others})


def _constants(values: Sequence[Any]) -> Iterator[_Text | _Json]:
    strings = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    if strings:
        yield _Text((_regex("|".join(map(re.escape, strings))),))
    if others:
        yield _Json({"enum": others})


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    pattern = schema.get("pattern")
    least, most = _length(schema, "minLength"), _length(schema, "maxLength")
    if isinstance(pattern, str):
        yield _regex(_anywhere(pattern))
    if least is not None or most is not None:
        yield _regex(f"(?s:.{{{least or 0},{'' if most is None else most}}})")


def _length(schema: Mapping[str, Any], name: str) -> int | None:
    given = schema.get(name)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise SchemaError(f"{name}: {given!r} is no length; allowed: whole numbers, 0 and more")
    return given


def _anywhere(pattern: str) -> str:
    """JSON schema looks for `pattern` anywhere in a string; the result matches the whole string."""
    return "|".join(map(_alternative_anywhere, _alternatives(pattern)))


def _alternative_anywhere(pattern: str) -> str:
    first = pattern.startswith("^")
    last = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[first : len(pattern) - last]
    return f"{'' if first else '(?s:.*)'}(?:{inner}){'' if last else '(?s:.*)'}"


def _alternatives(pattern: str) -> list[str]:
    """Cut at each | that is outside of groups and classes."""
    parts, depth = [""], 0
    for piece in _REGEX_TOKENS.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _without(tag: str) -> str:
    """Any text without `tag`."""
    return f"{_ANY_TEXT} & ~{_regex(f'(?s:.*){re.escape(tag)}(?s:.*)')}"


def _regex(pattern: str) -> str:
    """`pattern` between Lark's slashes."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    return "/" + escaped.replace("\\\n", "\\n").replace("\n", "\\n") + "/"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": JSON_SPACE}}, ensure_ascii=False)


def _shared(root: Mapping[str, Any]) -> dict[str, Any]:
    """What references of a part of `root` lead to."""
    return {name: root[name] for name in _SHARED if name in root}


def _tag(style: ToolStyle, tag: str) -> str:
    token_id = style.tag_ids.get(tag)
    return _literal(tag) if token_id is None else f"<[{token_id}]>"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
