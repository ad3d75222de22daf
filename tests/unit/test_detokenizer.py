"""Incremental detokenising: exact whatever the cuts (fault 16)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from tests.unit.router_harness import VOCAB_SIZE, byte_ids, encode, raw_tokenizer, text_model

TOKENIZER = text_model().tokenizer
ENTRIES = raw_tokenizer().get_vocab_size()
ids_strategy = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def deltas(ids: list[int], cuts: list[int], prompt: list[int] | None = None) -> list[str]:
    """The deltas of `ids` pushed in pieces that begin at `cuts`."""
    detokenizer = Detokenizer(TOKENIZER, prompt or [])
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[begin:end]) for begin, end in itertools.pairwise(borders)]
    return [*pieces, detokenizer.finish()]


@given(ids_strategy, st.lists(st.integers(0, 100), max_size=10))
def test_deltas_concatenate_to_the_one_shot_text_for_every_cut(ids: list[int], cuts: list[int]) -> None:
    assert "".join(deltas(ids, cuts)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, ENTRIES - 1), max_size=40))
def test_the_text_is_that_of_the_tokenizers_library(ids: list[int]) -> None:
    assert "".join(deltas(ids, list(range(len(ids))))) == raw_tokenizer().decode(ids, skip_special_tokens=True)


@given(st.text(max_size=30))
def test_every_text_survives_a_token_at_a_time(text: str) -> None:
    assume("<|" not in text)
    ids = encode(text)
    for token_ids in (ids, byte_ids(text.encode())):
        assert "".join(deltas(token_ids, list(range(len(token_ids))))) == text


@pytest.mark.parametrize("text", ["é", "你", "🙂", "👩‍👩‍👧"])
def test_a_character_is_released_with_its_last_byte_and_not_before(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    for character in text:
        *head, last = byte_ids(character.encode())
        assert [detokenizer.push([token_id]) for token_id in head] == [""] * len(head)
        assert detokenizer.push([last]) == character
    assert detokenizer.finish() == ""


def test_a_genuine_replacement_character_is_released_at_once() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(byte_ids("\ufffd".encode())) == "\ufffd"


def test_invalid_bytes_are_released_as_soon_as_they_cannot_become_a_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(byte_ids(b"\xff")) == "\ufffd"
    assert detokenizer.push(byte_ids(b"\xe4\xbd")) == ""
    assert detokenizer.push(byte_ids(b"a")) == "\ufffda"


def test_an_incomplete_end_becomes_one_replacement_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(byte_ids("ok🙂".encode()[:-1])) == "ok"
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_prompt_that_ends_within_a_character_is_continued(split: int) -> None:
    data = "🙂".encode()
    prompt, new = byte_ids(b"hi" + data[:split]), byte_ids(data[split:] + b"!")
    assert "".join(deltas(new, list(range(len(new))), prompt)) == "🙂!"


def test_a_prompt_that_ends_within_a_character_and_is_not_continued_keeps_its_broken_bytes() -> None:
    prompt = byte_ids(b"hi" + "🙂".encode()[:2])
    assert "".join(deltas(byte_ids(b"no"), [], prompt)) == "no"
    assert "".join(deltas([], [], prompt)) == ""


def test_a_control_token_after_a_prompt_within_a_character_changes_nothing() -> None:
    prompt = [*byte_ids("🙂".encode()[:2]), *encode("<|user|>")]
    assert "".join(deltas([*encode("<|user|>"), *byte_ids("🙂".encode()[2:])], [1], prompt)) == "🙂"


def test_control_tokens_are_skipped_and_other_added_tokens_are_text() -> None:
    ids = encode("a<think>b<|endoftext|>c<|assistant|>")
    assert "".join(deltas(ids, [])) == "a<think>bc"


def test_ids_that_the_tokenizer_lacks_have_no_text() -> None:
    assert "".join(deltas([*encode("a"), VOCAB_SIZE - 1, *encode("b")], [])) == "ab"
