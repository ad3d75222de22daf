"""Token bytes to text as they come, byte-exact."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from router.text.tokenizer import TextTokenizer

_MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """The text of one growing sequence of ids.

    Deltas, with the one of `finish`, concatenate to the UTF-8 decoding of all bytes, however the ids are cut. A
    character is held back until its last byte; bytes that can no longer become a character are released as U+FFFD at
    once. Cost is that of the new bytes: nothing is decoded twice.

    A prompt may end in the middle of a character. If the first new bytes continue it, the whole character is new text;
    if they do not, the broken beginning stays the prompt's and is not reported.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int] = (), *, echoes: bool = False) -> None:
        """`echoes`: the text begins with the prompt's, and so with all of its bytes: see `echo_text`."""
        self._bytes = tokenizer.token_bytes
        self._special = tokenizer.special_ids
        # The beginning of a character; while `_in_prompt`, all of it is the prompt's.
        self._open = self._open_character(prompt_ids)
        self._in_prompt = bool(self._open) and not echoes

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` complete."""
        table, special = self._bytes, self._special
        data = b"".join([table[token_id] for token_id in ids if token_id not in special])
        if self._open and data:
            if self._in_prompt:
                self._settle_prompt(data)
            data = self._open + data
            self._open = b""
        text, used = codecs.utf_8_decode(data, "replace", False)
        if used < len(data):
            self._open = data[used:]
        return text

    def finish(self) -> str:
        """What is left: U+FFFD if the text ends within a character, else nothing. What is pushed next is a new text."""
        left = b"" if self._in_prompt else self._open
        self._open, self._in_prompt = b"", False
        return left.decode(errors="replace")

    def _open_character(self, prompt_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._special:
                tail = self._bytes[token_id] + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        return _incomplete_suffix(tail)

    def _settle_prompt(self, data: bytes) -> None:
        """Forget the prompt's open character unless the first new byte continues it."""
        self._in_prompt = False
        try:
            codecs.utf_8_decode(self._open + data[:1], "strict", False)
        except UnicodeDecodeError:
            self._open = b""


def echo_text(tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> str:
    """The prompt's own text, up to a character that its end leaves incomplete."""
    data = b"".join(tokenizer.token_bytes[token_id] for token_id in prompt_ids)
    return codecs.utf_8_decode(data, "replace", False)[0]


def _incomplete_suffix(data: bytes) -> bytes:
    _, used = codecs.utf_8_decode(data, "replace", False)
    return data[used:]
