"""What the router knows of the served model: the files of its checkpoint that are about text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.errors import CheckpointError
from router.text.answer import AnswerStyle
from router.text.answer_style import answer_style
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import TextTokenizer
from router.validation import SAMPLING_BOUNDS

# Field of SamplingOptions -> key of generation_config.json, for those whose default a checkpoint may set.
_GENERATION_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}


@dataclass(frozen=True)
class TextModel:
    """`defaults`: values of SamplingOptions fields that the checkpoint sets. `template`: None if it has none.

    `answers`: what answers to conversations may hold.
    """

    vocab_size: int
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    answers: AnswerStyle
    defaults: Mapping[str, float]

    @classmethod
    def load(cls, directory: Path) -> TextModel:
        """Read the model directory. Raises CheckpointError."""
        config = _read_json(directory / "config.json")
        vocab_size = config.get("vocab_size")
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise CheckpointError(f"{directory}/config.json: vocab_size must be a positive integer, not {vocab_size!r}")
        defaults = _generation_defaults(directory / "generation_config.json")
        return cls.of(TextTokenizer.load(directory, vocab_size), ChatTemplate.load(directory), defaults)

    @classmethod
    def of(cls, tokenizer: TextTokenizer, template: ChatTemplate | None, defaults: Mapping[str, float]) -> TextModel:
        """A model of these parts."""
        return cls(len(tokenizer.token_bytes), tokenizer, template, answer_style(template, tokenizer), defaults)


def _generation_defaults(path: Path) -> dict[str, float]:
    if not path.is_file():
        return {}
    config = _read_json(path)
    defaults = {}
    for name, key in _GENERATION_KEYS.items():
        value = config.get(key)
        if value is None:
            continue
        bounds = SAMPLING_BOUNDS[name]
        if not isinstance(value, int | float) or not bounds.allow(value):
            raise CheckpointError(f"{path}: {key} is {value!r}; allowed: {bounds}")
        defaults[name] = value
    return defaults


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
