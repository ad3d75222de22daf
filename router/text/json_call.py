"""Hermes tool calls: one JSON object {"name": NAME, "arguments": {...}}, read character by character.

Only a scanner of JSON knows whether </tool_call> is within a string. The arguments are passed on as the model wrote
them, as soon as the name is known.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from router.text.call_sink import CallSink
from router.text.tool_calls import END_TOOL_CALL, CallEnd

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class JsonCall:
    """Reads one call, from after <tool_call> to </tool_call>."""

    def __init__(self, sink: CallSink, known: Collection[str] | None) -> None:
        """`known`: what has none of these names is no call; None: any name will do."""
        self._sink = sink
        self._known = known
        self._raw: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        # The object is closed or broken: all that may follow is the end.
        self._over = False
        self._key: str | None = None
        # What has been read of a key or value of the outer object, and not been passed on.
        self._item: list[str] = []
        self._begun = False
        self._arguments_begun = False
        self._early_arguments: str | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags to look for in text: none as long as they may be within a string."""
        return (END_TOOL_CALL,) if self._over else ()

    def accepts(self, tag: str) -> bool:
        """Whether `tag`, which came as a token of its own, is no text."""
        return tag == END_TOOL_CALL and not self._in_string

    def text(self, text: str) -> str:
        """Text that is no tag. Returns what comes after the object, of which the first may be the end tag."""
        if self._over:
            self._raw.append(text)
            return ""
        position = 0
        for character in text:
            self._read(character)
            if self._over and character != "}":
                break  # it is no part of the object
            position += 1
            if self._over:
                break
        self._raw.append(text[:position])
        self._pass_on()
        return text[position:]

    def tag(self, tag: str) -> CallEnd:
        """The end tag. Returns how the call ended."""
        self._end_item()
        if not self._begun:
            return CallEnd("".join(self._raw) + tag)
        if not self._arguments_begun:
            self._sink.add_arguments("{}")
        if self._depth < 2 and not self._in_string:
            self._sink.end()
        return CallEnd()

    def finish(self, *, stopped: bool) -> str:
        """The answer is over; `stopped`: the model ended it. Returns text that turned out to be no call."""
        if self._begun and not (self._over and stopped):
            return ""
        return self.tag("").rejected or "" if self._over or stopped else ""

    def _read(self, character: str) -> None:
        if self._in_string:
            self._read_in_string(character)
        elif self._depth == 0:
            self._depth = int(character == "{")
            self._over = character != "{" and character not in _SPACE
        elif self._depth == 1 and character in ",:}" + _SPACE:
            self._read_between(character)
        elif character == "<":
            self._over = True
        else:
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "]}")
            self._item.append(character)

    def _read_in_string(self, character: str) -> None:
        self._item.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        else:
            self._in_string = character != '"'

    def _read_between(self, character: str) -> None:
        if character == ":":
            self._key = _parse("".join(self._item))
            self._item.clear()
        elif character not in _SPACE:
            self._end_item()
            self._over = character == "}"
            self._depth -= self._over

    def _end_item(self) -> None:
        """A value of the outer object is whole, or as whole as it gets."""
        value = "".join(self._item)
        if self._key == _NAME and not self._begun:
            self._begin(_parse(value))
        elif self._key in _ARGUMENTS and self._begun:
            self._add_whole(value)
        elif self._key in _ARGUMENTS:
            self._early_arguments = value
        self._key = None
        self._item.clear()

    def _begin(self, name: Any) -> None:
        if isinstance(name, str) and name and (self._known is None or name in self._known):
            self._begun = True
            self._sink.begin(name)
            if self._early_arguments is not None:
                self._add_whole(self._early_arguments)

    def _pass_on(self) -> None:
        """Send what there is of an object of arguments."""
        if self._begun and self._key in _ARGUMENTS and self._item:
            if not self._arguments_begun and self._item[0] != "{":
                return  # null, or JSON in a string: not before it is whole
            self._arguments_begun = True
            self._sink.add_arguments("".join(self._item))
            self._item.clear()

    def _add_whole(self, value: str) -> None:
        if not self._arguments_begun:
            text = _parse(value) if value.startswith('"') else None
            value = text or ("{}" if value in ("", "null") else value)
        self._arguments_begun = True
        self._sink.add_arguments(value)


def _parse(text: str) -> Any:
    """The JSON value of `text`; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
