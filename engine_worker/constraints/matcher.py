"""What one request may say next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from engine_worker.runtime.records import MaskArray


def error_line(matcher: LLMatcher) -> str:
    """Why a matcher gave up; empty: it did not."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


class RequestConstraint:
    """Follows the generated tokens of a request. Not shared; one thread at a time."""

    def __init__(self, matcher: LLMatcher, begin_after: int | None, min_tokens: int, eos_ids: Sequence[int]) -> None:
        """`matcher`: at its beginning; it sees what comes after the first `begin_after`, or all.

        `eos_ids` may end the text where the grammar allows it, but not before `min_tokens` unless nothing else is left.
        """
        self.matcher = matcher
        self._begin_after = begin_after
        self._min_tokens = min_tokens
        self._eos_ids = tuple(eos_ids)
        self._begun = begin_after is None
        self._seen = 0  # generated tokens

    def advance(self, generated: Sequence[int]) -> str:
        """Take in what is new of all `generated` tokens. Returns what is wrong with them, or nothing."""
        new = generated[self._seen :]
        self._seen = len(generated)
        if self._begin_after is not None and not self._begun:
            if self._begin_after not in new:
                return ""
            new = new[list(new).index(self._begin_after) + 1 :]
            self._begun = True
        if new and not self.matcher.consume_tokens(list(new)):
            return self.error
        return ""

    @property
    def error(self) -> str:
        """Why the matcher gave up; empty: it did not."""
        return error_line(self.matcher)

    @property
    def begun(self) -> bool:
        """Whether the grammar rules the next token; before, any may come."""
        return self._begun

    def hold_end(self, mask: MaskArray) -> None:
        """Take the end of the text out of `mask`, of the next token, while too few tokens were generated."""
        if self._seen >= self._min_tokens:
            return
        without = mask.copy()
        for token in self._eos_ids:
            without[token // 32] &= ~np.uint32(1 << token % 32)
        if without.any():
            mask[:] = without
