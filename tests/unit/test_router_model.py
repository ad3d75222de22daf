"""Loading a model directory: what is taken from it, and what stops start-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from router.errors import CheckpointError
from router.model import TextModel
from router.text.tokenizer import TextTokenizer
from tests.unit.router_harness import VOCAB_SIZE, encode, raw_tokenizer, text_model, write_model


async def test_loads_tokenizer_template_and_defaults(tmp_path: Path) -> None:
    model = TextModel.load(write_model(tmp_path))
    assert model.vocab_size == VOCAB_SIZE
    assert await model.tokenizer.encode("The capital", add_special_tokens=True) == encode("The capital")
    assert model.template is not None
    assert model.template.render([{"role": "user", "content": "x"}]) == "<|user|>x<|assistant|>"
    assert model.defaults == {"temperature": 0.7, "top_p": 0.9}


def test_template_and_generation_config_may_be_missing(tmp_path: Path) -> None:
    model = TextModel.load(write_model(tmp_path, tokenizer_config__json=None, generation_config__json=None))
    assert model.template is None
    assert model.defaults == {}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"config__json": None}, ("config.json",)),
        ({"config__json": {}}, ("config.json", "vocab_size", "None")),
        ({"config__json": {"vocab_size": -1}}, ("vocab_size", "-1")),
        ({"config__json": {"vocab_size": 10}}, ("tokenizer.json", "vocab_size is 10")),
        ({"config__json": []}, ("config.json", "not a JSON object")),
        ({"tokenizer__json": None}, ("tokenizer.json", "no such file")),
        ({"tokenizer__json": {}}, ("tokenizer.json",)),
        ({"tokenizer_config__json": {"chat_template": [1]}}, ("tokenizer_config.json", "chat_template")),
        ({"generation_config__json": {"temperature": 3}}, ("generation_config.json", "temperature", "3", "0 to 2")),
        ({"generation_config__json": {"top_p": "high"}}, ("generation_config.json", "top_p", "'high'")),
        ({"generation_config__json": []}, ("generation_config.json", "not a JSON object")),
    ],
)
def test_damage_is_named(tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        TextModel.load(write_model(tmp_path, **changes))
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    sentence_piece = Tokenizer(models.Unigram())
    sentence_piece.decoder = decoders.Metaspace()
    with pytest.raises(CheckpointError, match="Unigram with decoder Metaspace is not supported"):
        TextTokenizer(sentence_piece, VOCAB_SIZE)


def test_token_bytes_are_exact_for_every_entry() -> None:
    tokenizer, raw = text_model().tokenizer, raw_tokenizer()
    for token_id in range(raw.get_vocab_size()):
        decoded = raw.decode([token_id], skip_special_tokens=False)
        assert tokenizer.token_bytes[token_id].decode(errors="replace") == decoded
    assert {len(data) for data in tokenizer.token_bytes if len(data) == 1} == {1}
    assert sorted(data[0] for data in tokenizer.token_bytes if len(data) == 1) == list(range(256))


def test_tokens_outside_of_the_byte_alphabet_stand_for_themselves() -> None:
    raw = Tokenizer(models.BPE(vocab={"a": 0, "Ġ": 1, "a b": 2, "\u00adx": 3, "你": 4}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    tokenizer = TextTokenizer(raw, 5)
    assert tokenizer.token_bytes == [b"a", b" ", b"a b", "\u00adx".encode(), "你".encode()]
    for token_id in range(5):
        assert tokenizer.decode([token_id], skip_special_tokens=False) == raw.decode([token_id])


async def test_settings_for_padding_and_truncation_in_the_file_are_ignored() -> None:
    raw = Tokenizer.from_str(raw_tokenizer().to_str())
    raw.enable_truncation(2)
    raw.enable_padding(length=8)
    tokenizer = TextTokenizer(raw, VOCAB_SIZE)
    assert await tokenizer.encode("The capital of France", add_special_tokens=True) == encode("The capital of France")


async def test_long_texts_are_encoded_alike() -> None:
    text = "The capital of France is Paris. 你好 " * 200
    assert await text_model().tokenizer.encode(text, add_special_tokens=False) == encode(text)
