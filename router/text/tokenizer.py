"""The checkpoint's tokeniser: text to ids, and the exact bytes of every id.

`tokenizers` is used directly: importing transformers costs a second of start-up and adds nothing for a tokenizer.json.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from router.errors import CheckpointError

# Texts longer than this are encoded on a thread, so that they do not hold up the streams of others (about 2 ms).
_INLINE_CHARACTERS = 1024


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte of GPT-2's byte-level alphabet: printable Latin-1 as it is, the rest at 256, 257, ...

    Latin-1 characters outside of the alphabet map to one that is no byte.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return dict.fromkeys(others, 0xFFFF) | {256 + index: byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class TextTokenizer:
    """Immutable once loaded; safe to share.

    `token_bytes[id]`: the bytes the id stands for; b"" for an id of the model's vocabulary that the tokeniser lacks.
    `special_ids`: ids of control tokens, which are no part of a text. `added_ids`: text -> id of the tokens, control
    tokens among them, that the tokeniser looks for in a text before it splits the rest.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: rows of the model's embedding, often more than the tokeniser's entries.

        Raises CheckpointError: not a byte-level tokeniser, or an id is outside of `vocab_size`.
        """
        _require_byte_level(tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self.token_bytes = [b""] * vocab_size
        for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
            if token_id >= vocab_size:
                raise CheckpointError(
                    f"tokenizer.json: token {token!r} has id {token_id}, but config.json's vocab_size is {vocab_size}"
                )
            self.token_bytes[token_id] = token.encode() if token_id in added else _decode_byte_level(token)

    @classmethod
    def load(cls, directory: Path, vocab_size: int) -> TextTokenizer:
        """Read `directory`/tokenizer.json. Raises CheckpointError."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; a checkpoint needs its fast tokeniser")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise CheckpointError(f"{path}: {error}") from None
        return cls(tokenizer, vocab_size)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; with `add_special_tokens` also what the tokeniser itself puts around a text."""
        if len(text) <= _INLINE_CHARACTERS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # encode holds the interpreter lock; encode_batch releases it.
            [encoding] = await asyncio.to_thread(
                self._tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens
            )
        return list(encoding.ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The whole text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes[i] for i in ids if i not in skipped).decode(errors="replace")


def _require_byte_level(tokenizer: Tokenizer) -> None:
    model, decoder = type(tokenizer.model).__name__, type(tokenizer.decoder).__name__
    if (model, decoder) != ("BPE", "ByteLevel"):
        raise CheckpointError(
            f"tokenizer.json: model {model} with decoder {decoder} is not supported; "
            "GLM-4.5 and later use BPE with decoder ByteLevel"
        )


def _decode_byte_level(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # a character that is not of the alphabet stands for itself, and so does the token
        return token.encode()
