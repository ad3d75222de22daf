"""Tags in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


def find_tag(text: str, tags: Sequence[str]) -> tuple[int, str | None]:
    """Where the first of `tags` is in `text`, and which it is.

    None: in no place; then the position is where a tag may have begun whose end is yet to come, or the end of `text`.
    All `tags` begin with "<" and none has another in it.
    """
    start = text.find("<")
    while start >= 0:
        for tag in tags:
            if text.startswith(tag, start):
                return start, tag
        rest = text[start : start + max(map(len, tags))]
        if start + len(rest) == len(text) and any(tag.startswith(rest) for tag in tags):
            return start, None
        start = text.find("<", start + 1)
    return len(text), None
