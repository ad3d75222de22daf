"""Stop strings in a stream of text, whatever the borders of its pieces.

An Aho-Corasick automaton (Aho and Corasick, 1975) over characters: linear in the text, and its depth is the length of
the longest suffix that may still become a stop string, which is exactly what must be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _State:
    depth: int
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None
    # The longest stop string that ends here.
    match: str | None = None


class StopStrings:
    """Finds the first stop string of one text.

    The match that is complete first wins; of several that end at the same character, the longest. Neither it nor
    anything after it is released.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty. No stops: text passes through."""
        self._root = _build(stops)
        self._state = self._root
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that no stop string can take back any more. Nothing once `matched` is set."""
        if self.matched is not None:
            return ""
        if not self._root.next:
            return text
        for position, character in enumerate(text):
            self._state = _advance(self._state, character)
            if self._state.match is not None:
                self.matched = self._state.match
                seen = self._held + text[: position + 1]
                return seen[: -len(self.matched)]
        seen = self._held + text
        cut = len(seen) - self._state.depth
        self._held = seen[cut:]
        return seen[:cut]

    def finish(self) -> str:
        """The text is over: what was held back, unless a stop string matched. What is pushed next is a new text."""
        held, self._held = self._held, ""
        self._state = self._root
        return "" if self.matched is not None else held


def _build(stops: Sequence[str]) -> _State:
    root = _State(depth=0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(depth=state.depth + 1))
        state.match = stop
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for character, child in state.next.items():
            child.fallback = root if state.fallback is None else _advance(state.fallback, character)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root


def _advance(state: _State, character: str) -> _State:
    node: _State | None = state
    while node is not None:
        child = node.next.get(character)
        if child is not None:
            return child
        node = node.fallback
        state = node or state
    return state
