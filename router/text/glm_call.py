"""GLM's tool calls, in lines (4.5) or compact (4.7): NAME, then <arg_key>K</arg_key><arg_value>V</arg_value> pairs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from json.encoder import encode_basestring as _quote

from router.text.argument_types import UNKNOWN_TOOL, ArgumentTypes, is_text, may_be_json, value_json
from router.text.call_sink import CallSink
from router.text.tool_calls import ARG_KEY, ARG_VALUE, END_ARG_KEY, END_ARG_VALUE, END_TOOL_CALL, CallEnd


class _Part(Enum):
    NAME = 0
    KEY = 1
    BEFORE_VALUE = 2
    VALUE = 3
    AFTER_VALUE = 4


# In a value every other tag is text: a file that is written may well hold one.
_TAGS = {
    _Part.NAME: (ARG_KEY, END_TOOL_CALL),
    _Part.KEY: (END_ARG_KEY,),
    _Part.BEFORE_VALUE: (ARG_VALUE, ARG_KEY, END_TOOL_CALL),
    _Part.VALUE: (END_ARG_VALUE,),
    _Part.AFTER_VALUE: (ARG_KEY, END_ARG_VALUE, END_TOOL_CALL),
}


class GlmCall:
    """Reads one call, from after <tool_call> to </tool_call>. Arguments are sent as they come, strings in pieces."""

    def __init__(self, sink: CallSink, tools: Mapping[str, ArgumentTypes], *, known_only: bool) -> None:
        """`known_only`: what has not the name of a tool is no call."""
        self._sink = sink
        self._known_only = known_only
        self._tools = tools
        self._types = UNKNOWN_TOOL
        # Tags that are no text here.
        self.tags: tuple[str, ...] = ()
        self._go(_Part.NAME)
        self._text = ""
        self._num_arguments = 0
        self._key = ""

    def accepts(self, tag: str) -> bool:
        """Whether `tag`, which came as a token of its own, is no text."""
        return tag in self.tags

    def text(self, text: str) -> str:
        """Text that is none of `tags`. Returns what is left of it once other tags are to be looked for."""
        if self._part is _Part.VALUE:
            self._value.add(text)
            return ""
        rest = text.lstrip() if self._part in (_Part.BEFORE_VALUE, _Part.AFTER_VALUE) else ""
        self._text += text[: len(text) - len(rest)]
        if rest:
            self._begin_value() if self._part is _Part.BEFORE_VALUE else self._resume_value()
        return rest

    def tag(self, tag: str) -> CallEnd | None:
        """One of `tags`. Returns how the call ended; None: it goes on."""
        text, self._text = self._text, ""
        if self._part is _Part.NAME and not self._begin(text.strip()):
            return CallEnd(rejected=text + tag)
        if tag == END_ARG_KEY:
            self._key = text.strip()
            self._go(_Part.BEFORE_VALUE)
        elif tag == ARG_VALUE:
            self._begin_value()
        elif tag == END_ARG_VALUE:
            if self._part is _Part.AFTER_VALUE:
                self._value.add(END_ARG_VALUE + text)
            self._go(_Part.AFTER_VALUE)
        else:
            if self._part is _Part.AFTER_VALUE:
                self._value.end()
            self._go(_Part.KEY)
        return self._end() if tag == END_TOOL_CALL else None

    def finish(self, *, stopped: bool) -> str:
        """The answer is over; `stopped`: the model ended it. Returns text that turned out to be no call.

        A call that lacks nothing but its end is whole if the model ended here; one within a value is never made whole.
        """
        if self._part is _Part.NAME:
            end = self.tag(END_TOOL_CALL) if stopped else None
            return (end.rejected or "").removesuffix(END_TOOL_CALL) if end else ""
        if self._part is _Part.AFTER_VALUE:
            self._value.end()
            if stopped:
                self._end()
        return ""

    def _go(self, part: _Part) -> None:
        self._part = part
        self.tags = _TAGS[part]

    def _begin(self, name: str) -> bool:
        if len(name.split()) != 1 or (self._known_only and name not in self._tools):
            return False
        self._types = self._tools.get(name, UNKNOWN_TOOL)
        self._sink.begin(name)
        return True

    def _begin_value(self) -> None:
        start = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._value = _Value(self._sink, f"{start}{_quote(self._key)}: ", self._types.of(self._key))
        self._text = ""
        self._go(_Part.VALUE)

    def _resume_value(self) -> None:
        """What seemed the end of the value is a part of it, for neither an argument nor the end of the call follows."""
        self._value.add(END_ARG_VALUE + self._text)
        self._text = ""
        self._go(_Part.VALUE)

    def _end(self) -> CallEnd:
        self._sink.add_arguments("}" if self._num_arguments else "{}")
        self._sink.end()
        return CallEnd()


class _Value:
    """One argument: a string is passed on as it comes, anything else once it is whole."""

    def __init__(self, sink: CallSink, beginning: str, types: frozenset[str]) -> None:
        self._sink = sink
        self._beginning = beginning
        self._types = types
        self._held: list[str] = []
        # None: too little is there to tell.
        self._streams: bool | None = None
        if is_text(types):
            self._begin_string()

    def add(self, text: str) -> None:
        if self._streams:
            self._sink.add_arguments(_quote(text)[1:-1])
            return
        self._held.append(text)
        if self._streams is None and text.strip():
            self._streams = False
            if not may_be_json(text, self._types):
                self._begin_string()
                self._sink.add_arguments(_quote("".join(self._held))[1:-1])

    def end(self) -> None:
        whole = '"' if self._streams else self._beginning + value_json("".join(self._held), self._types)
        self._sink.add_arguments(whole)

    def _begin_string(self) -> None:
        self._streams = True
        self._sink.add_arguments(f'{self._beginning}"')
