"""Token bytes to text as they come, byte-exact."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from router.text.tokenizer import TextTokenizer

_INCREMENTAL_UTF8 = codecs.getincrementaldecoder("utf-8")
_MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """The text of one growing sequence of ids.

    Deltas, with the one of `finish`, concatenate to the UTF-8 decoding of all bytes, however the ids are cut. A
    character is held back until its last byte; bytes that can no longer become a character are released as U+FFFD at
    once. Cost is that of the new bytes: nothing is decoded twice.

    A prompt may end in the middle of a character. If the first new bytes continue it, the whole character is new text;
    if they do not, the broken beginning stays the prompt's and is not reported.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._bytes = tokenizer.token_bytes
        self._special = tokenizer.special_ids
        self._decoder = _INCREMENTAL_UTF8("replace")
        self._prompt_tail = self._open_character(prompt_ids)
        self._decoder.decode(self._prompt_tail)

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` complete."""
        table, special = self._bytes, self._special
        data = b"".join([table[token_id] for token_id in ids if token_id not in special])
        if self._prompt_tail and data:
            self._settle_prompt_tail(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD if the sequence ends within a character, else nothing."""
        if self._prompt_tail:
            return ""
        return self._decoder.decode(b"", final=True)

    def _open_character(self, prompt_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._special:
                tail = self._bytes[token_id] + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        return _incomplete_suffix(tail)

    def _settle_prompt_tail(self, data: bytes) -> None:
        """Forget the prompt's open character unless the first new byte continues it."""
        try:
            _INCREMENTAL_UTF8("strict").decode(self._prompt_tail + data[:1])
        except UnicodeDecodeError:
            self._decoder.reset()
        self._prompt_tail = b""


def _incomplete_suffix(data: bytes) -> bytes:
    decoder = _INCREMENTAL_UTF8("replace")
    decoder.decode(data)
    return decoder.getstate()[0]
