"""Which JSON types a tool's schema allows for each argument, and a value as text to JSON by them.

GLM writes strings as they are and everything else as JSON, so only the schema tells "10001" from 10001.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STRING = "string"
ANY = frozenset({STRING, "null", "boolean", "integer", "number", "object", "array"})
_TEXT = frozenset({STRING})
# References may be circular.
_MAX_DEPTH = 16
# What a JSON value of each type, strings apart, can begin with.
_BEGINNINGS = {
    "null": "n",
    "boolean": "tf",
    "integer": "-0123456789",
    "number": "-0123456789",
    "object": "{",
    "array": "[",
}


@dataclass(frozen=True, slots=True)
class ArgumentTypes:
    """Allowed JSON types of one tool's arguments. `others`: of arguments that the schema does not name."""

    named: Mapping[str, frozenset[str]]
    others: frozenset[str]

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any]) -> ArgumentTypes:
        """`schema`: of an object, from outside: what is not understood in it allows anything."""
        properties = schema.get("properties")
        named = properties if isinstance(properties, dict) else {}
        types = SchemaTypes(schema)
        return cls(
            {name: types.allowed(each) for name, each in named.items()},
            types.allowed(schema.get("additionalProperties")),
        )

    def of(self, name: str) -> frozenset[str]:
        """Types that the argument `name` may have."""
        return self.named.get(name, self.others)


UNKNOWN_TOOL = ArgumentTypes({}, ANY)


def is_text(types: frozenset[str]) -> bool:
    """Only strings are allowed."""
    return types == _TEXT


def may_be_json(text: str, types: frozenset[str]) -> bool:
    """False once `text`, the beginning of a value, must be a string as it is."""
    first = text.lstrip()[:1]
    if not first or STRING not in types:
        return True
    return any(first in _BEGINNINGS[each] for each in types if each != STRING)


def value_json(text: str, types: frozenset[str]) -> str:
    """The whole value as JSON: itself if it is JSON of an allowed type, else a string."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    # Where no string is allowed, JSON of a wrong type is still what the model meant.
    if STRING not in types or any(_is(value, each) for each in types if each != STRING):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is(value: object, kind: str) -> bool:
    given = _type_of(value)
    if kind == "number":
        return given in ("integer", "number")
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return given == kind


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: STRING, dict: "object", list: "array"}
    return names[type(value)]


class SchemaTypes:
    """JSON types that schemas allow, whose references lead into `root`.

    Each part is looked at once at each depth: by references the ways to it may be more than can be gone.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # By the identity of a part, which `root` or the caller keeps, and the depth that is left.
        self._found: dict[tuple[int, int], frozenset[str]] = {}

    def allowed(self, schema: Any, depth: int = _MAX_DEPTH) -> frozenset[str]:
        """`schema`: from outside; what is not understood in it allows anything. `depth`: to which it is looked into."""
        if not isinstance(schema, dict) or depth == 0:
            return ANY
        place = (id(schema), depth)
        if place not in self._found:
            self._found[place] = self._look_at(schema, depth - 1)
        return self._found[place]

    def _look_at(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        result = ANY
        for keyword, value in schema.items():
            result &= self._by_keyword(keyword, value, depth)
        if schema.get("nullable") is True:
            result |= {"null"}
        return result or ANY

    def _by_keyword(self, keyword: str, value: Any, depth: int) -> frozenset[str]:
        match keyword, value:
            case "type", _:
                return _declared(value)
            case ("const", _) | ("enum", list()):
                return frozenset(_type_of(each) for each in (value if keyword == "enum" else [value]))
            case (("anyOf" | "oneOf"), list()):
                return frozenset().union(*(self.allowed(each, depth) for each in value))
            case "allOf", list():
                return ANY.intersection(*(self.allowed(each, depth) for each in value))
            case "$ref", _:
                return self.allowed(resolve_reference(value, self._root), depth)
        return ANY


def _declared(value: Any) -> frozenset[str]:
    names: Iterable[Any] = value if isinstance(value, list) else (value,)
    known = {name for name in names if isinstance(name, str)} & ANY
    if "number" in known:
        known.add("integer")
    return frozenset(known) or ANY


def resolve_reference(reference: Any, root: Mapping[str, Any]) -> Any:
    """The part of `root` that a local reference, "#/$defs/X", names; None: there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if name:
            node = node.get(name) if isinstance(node, dict) else None
    return node
