"""Content and reasoning of an answer, each without the space that only sets it apart from other parts."""

from __future__ import annotations

from router.text.reasoning import END_THINK, THINK
from router.text.stop_strings import StopStrings
from router.text.tool_calls import TOOL_CALL

_SPACE = " \t\r\n"


class Reasoning:
    """Its text, without the space around it."""

    def __init__(self, *, calls: bool) -> None:
        """`calls`: a call may begin here, and so end it."""
        # Tags that are no text here.
        self.tags = (END_THINK, TOOL_CALL) if calls else (END_THINK,)
        self._parts: list[str] = []
        self._num_taken = 0
        self._space = ""

    def accepts(self, tag: str) -> bool:
        """Whether `tag`, which came as a token of its own, is no text here."""
        return tag in self.tags

    def text(self, text: str) -> str:
        """Add text that is no tag. Returns what of it is not the reasoning's: nothing."""
        whole = self._space + text if self._parts else text.lstrip(_SPACE)
        body = whole.rstrip(_SPACE)
        self._space = whole[len(body) :]
        if body:
            self._parts.append(body)
        return ""

    def whole(self) -> str:
        """All of it."""
        return "".join(self._parts)

    def take(self) -> str:
        """What is new."""
        start, self._num_taken = self._num_taken, len(self._parts)
        return "".join(self._parts[start:])


class Content:
    """Its text up to a stop string, without the space beside reasoning and calls."""

    def __init__(self, stops: StopStrings, exempt: int, *, thinks: bool, calls: bool, after_reasoning: bool) -> None:
        """`thinks`, `calls`: reasoning or calls may begin here."""
        self.stops = stops
        # How many of the coming ids cannot end the text.
        self.exempt = exempt
        self._thinks = thinks
        self._calls = calls
        self._text = ""
        self._space = ""
        # Space that comes next stands beside reasoning or a call.
        self._skips_space = after_reasoning
        self._empty = True

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags to look for in text: reasoning can only come first."""
        thinking = (THINK, END_THINK) if self._thinks and self._empty else ()
        return (*thinking, TOOL_CALL) if self._calls else thinking

    def accepts(self, tag: str) -> bool:
        """Whether `tag`, which came as a token of its own, is no text here."""
        return tag in self.tags or (tag == THINK and self._thinks)

    def text(self, text: str) -> str:
        """Add text that is none of `tags`. Returns what is left of it once other tags are to be looked for."""
        rest = ""
        if self._empty and text.strip(_SPACE):
            self._empty = False
            if self._thinks:
                end = len(text) - len(text.lstrip(_SPACE)) + 1
                text, rest = text[:end], text[end:]
        self._add(text if self.exempt > 0 else self.stops.push(text))
        return rest

    @property
    def empty(self) -> bool:
        """No text has come, space apart."""
        return self._empty

    def plain(self, text: str) -> None:
        """Add text in which no tag is to be looked for."""
        while text:
            text = self.text(text)

    def pause(self) -> None:
        """Something else begins, which no stop string reaches across."""
        self._add(self.stops.finish())

    def resume(self) -> None:
        """Something else has ended."""
        self._space = ""
        self._skips_space = True

    def finish(self) -> None:
        """The answer ends here."""
        self.pause()
        self._text += self._space
        self._space = ""

    def take(self) -> str:
        """What is new."""
        text, self._text = self._text, ""
        return text

    def _add(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip(_SPACE)
        if not text:
            return
        self._skips_space = False
        whole = self._space + text
        may_pause = self._calls or (self._thinks and self._empty)
        body = whole.rstrip(_SPACE) if may_pause else whole
        self._space = whole[len(body) :]
        self._text += body
